"""Makes the environment that lm-eval runs in: packages of its own over those of the virtual environment around it.

`make setup` runs it. lm-eval wants an older python-dateutil than the operator's client of Kubernetes, so the two cannot
share one set of packages. This one has only what differs: torch, transformers and the rest are those of the outer
environment, which is left as it is.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

REQUIREMENT = "lm-eval[api]>=0.4.13,<0.5"
FOLDER = Path(sys.prefix).resolve() / "lm-eval"
_PYTHON = FOLDER / "bin" / "python"
_COMPLETE = FOLDER / ".complete"


def lm_eval_python() -> Path:
    """The interpreter that can import lm_eval, transformers and torch.

    Raises:
        LookupError: it was not made to the end; the sentence says how to make it.
    """
    if not is_here():
        raise LookupError(f"{REQUIREMENT} is not in {FOLDER}; run make setup")
    return _PYTHON


def is_here() -> bool:
    """Whether the environment was made to the end, for this requirement."""
    return _COMPLETE.is_file() and _COMPLETE.read_text() == REQUIREMENT


def make() -> None:
    """Make the environment, whatever is there.

    Raises:
        RuntimeError: a step failed; the message has the end of what it printed.
    """
    _run(sys.executable, "-m", "venv", "--clear", "--without-pip", str(FOLDER))
    outer, version = (
        Path(sysconfig.get_path("purelib")).resolve(),
        f"python{sys.version_info.major}.{sys.version_info.minor}",
    )
    (FOLDER / "lib" / version / "site-packages" / "outer.pth").write_text(f"{outer}\n")
    # pip leaves alone what it finds outside of the environment that it runs in.
    _run(str(_PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off", REQUIREMENT)
    _COMPLETE.write_text(REQUIREMENT)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {(done.stdout + done.stderr)[-2000:]}")


if __name__ == "__main__":
    if not is_here():
        print(f"==> making an environment of its own for lm-eval in {FOLDER} (half a minute)")
        make()
