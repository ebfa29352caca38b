"""Brings packages of others onto this machine as data: chat templates and request schemas that tests compare with.

`make setup` runs it. Each package is downloaded with pip, without its dependencies and without being installed; only
the files that tests read are kept, in a folder of the user's cache. Nothing of a package is ever imported.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ReferencePackage:
    """One package and what is kept of it."""

    name: str
    version: str
    patterns: tuple[str, ...]
    """Paths inside the archive, as shell patterns; a source distribution's first folder does not count."""
    build_tools: tuple[str, ...] = ()
    """A source distribution whose metadata must be built, with these and with what is installed here already."""
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return _cache() / f"{self.name}-{self.version}"

    @property
    def is_here(self) -> bool:
        """Whether it was unpacked to the end."""
        return (self.folder / ".complete").is_file()


PACKAGES = (
    ReferencePackage("axolotl", "0.19.0", ("axolotl/utils/chat_templates/templates/*.jinja",)),
    ReferencePackage("trl", "1.16.0", ("trl/chat_templates/*.jinja",)),
    ReferencePackage(
        "llama-cpp-python", "0.3.36", ("vendor/llama.cpp/models/templates/*.jinja",), build_tools=("scikit-build-core",)
    ),
    ReferencePackage(
        "vllm",
        "0.33.0",
        ("examples/*.jinja", "vllm/entrypoints/*.py", "vllm/sampling_params.py"),
        build_tools=("setuptools-scm", "setuptools-rust"),
        environment=(("VLLM_TARGET_DEVICE", "empty"), ("VLLM_VERSION_OVERRIDE", "0.33.0")),
    ),
)


def folder_of(name: str) -> Path:
    """The files of one package.

    Raises:
        LookupError: it is not on this machine; the sentence says how to bring it.
    """
    package = next(package for package in PACKAGES if package.name == name)
    if not package.is_here:
        raise LookupError(f"the reference package {name} {package.version} is not in {package.folder}; run make setup")
    return package.folder


def fetch(package: ReferencePackage) -> None:
    """Download one package and keep what tests read.

    Raises:
        RuntimeError: pip failed, or the archive has none of the files.
    """
    with tempfile.TemporaryDirectory() as scratch:
        archive = _download(package, Path(scratch))
        unpacked = Path(scratch) / "unpacked"
        num_files = _unpack(archive, unpacked, package.patterns)
        if not num_files:
            raise RuntimeError(f"{archive.name} has no file {' or '.join(package.patterns)}")
        (unpacked / ".complete").touch()
        shutil.rmtree(package.folder, ignore_errors=True)
        package.folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(unpacked, package.folder)
    print(f"    {package.name} {package.version}: {num_files} files", flush=True)


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "pdserve" / "reference"


def _download(package: ReferencePackage, scratch: Path) -> Path:
    """The archive, with pip as the client."""
    wanted, options = f"{package.name}=={package.version}", ["--no-deps", "--dest", str(scratch / "archives")]
    environment = {**os.environ, **dict(package.environment)}
    if package.build_tools:
        _pip(["install", "--target", str(scratch / "tools"), *package.build_tools], environment)
        environment["PYTHONPATH"] = str(scratch / "tools")
        options += ["--no-binary", package.name, "--no-build-isolation"]
    _pip(["download", *options, wanted], environment)
    return next((scratch / "archives").iterdir())


def _pip(arguments: list[str], environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"pip {' '.join(arguments)} failed:\n{done.stderr[-2000:]}")


def _unpack(archive: Path, target: Path, patterns: tuple[str, ...]) -> int:
    """Write the wanted files below `target`; returns how many."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            contents = {name: wheel.read(name) for name in wheel.namelist() if _is_wanted(name, patterns)}
    else:
        contents = {}
        with tarfile.open(archive) as source:
            for member in source:
                name = member.name.partition("/")[2]
                if member.isfile() and _is_wanted(name, patterns) and (file := source.extractfile(member)) is not None:
                    contents[name] = file.read()
    for name, content in contents.items():
        file = target / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return len(contents)


def _is_wanted(name: str, patterns: tuple[str, ...]) -> bool:
    return ".." not in Path(name).parts and any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def main() -> int:
    """Fetch what is missing."""
    missing = [package for package in PACKAGES if not package.is_here]
    if missing:
        print("==> bringing packages that tests compare with, as data", flush=True)
    for package in missing:
        try:
            fetch(package)
        except (RuntimeError, OSError) as error:
            print(f"cannot bring {package.name} {package.version}, which tests compare with: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
