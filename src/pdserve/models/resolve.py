"""Finds the local Hugging Face folder for what a user names. Torch-free: models are made in other processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from pdserve.errors import ModelError
from pdserve.models.demo import DEMO_NAME, find_demo_gguf
from pdserve.models.fields.check import check_folder
from pdserve.models.identity import file_fingerprint
from pdserve.models.store import build_once
from pdserve.models.weight_files import check_weights

_RECIPE = "r4"
"""Part of the names of folders made here: raised when what is made changes, so that no old one is served."""
_TINY_BYTES = 4 << 20
_TOKENIZER_BYTES = 64 << 20
_HUB_PREFIX = "hf://"
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]


def home_folder(env: Mapping[str, str]) -> Path:
    """Where pdserve keeps what it makes: `PDS_HOME`, or ~/.cache/pdserve."""
    return Path(env.get("PDS_HOME") or Path.home() / ".cache" / "pdserve")


def resolve_model(source: str, home: Path, progress: Callable[[str], None]) -> Path:
    """Find, convert, make or download a model; later calls are instant.

    Args:
        source: `demo`, `tiny`, a folder, a *.gguf file, or `hf://owner/name[@revision]`.
        home: `home_folder(…)`; models that are made lie in its subfolder `models`.
        progress: called with one line per stage.

    Raises:
        ModelError: with the remedy.
    """
    models = home / "models"
    if source == "demo":
        return _from_gguf(find_demo_gguf(), models, progress)
    if source == "tiny":
        return build_once(
            models / f"tiny-{_RECIPE}", "pdserve.models.tiny", [], progress, num_bytes=lambda: _TINY_BYTES
        )
    if source.startswith(_HUB_PREFIX):
        return _from_hub(source.removeprefix(_HUB_PREFIX), progress)
    path = Path(source).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return _from_gguf(path, models, progress)
    return _checked_folder(path, progress)


def served_model_name(source: str) -> str:
    """The name clients use when SERVED_MODEL_NAME does not say another."""
    if source == "demo":
        return DEMO_NAME
    if source.startswith(_HUB_PREFIX):
        return source.removeprefix(_HUB_PREFIX).partition("@")[0]
    path = Path(source).expanduser()
    return path.stem if path.suffix == ".gguf" else path.resolve().name


def _checked_folder(path: Path, progress: Callable[[str], None]) -> Path:
    if not path.is_dir():
        raise ModelError(
            f"there is no model {str(path)!r}: give demo, tiny, a Hugging Face folder, a .gguf file or hf://owner/name"
        )
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} has no config.json: expected a Hugging Face model folder")
    check_weights(path)
    for line in check_folder(path):
        progress(line)
    return path


def _from_gguf(file: Path, models: Path, progress: Callable[[str], None]) -> Path:
    """Named by content: another file of the same name is another model."""
    folder = models / f"{file.stem.lower()}-{file_fingerprint(file)[:8]}-{_RECIPE}"
    if not folder.is_dir():
        progress(f"converting {file.name} (once)")
    return build_once(folder, "pdserve.models.gguf", [str(file)], progress, num_bytes=lambda: _converted_bytes(file))


def _converted_bytes(file: Path) -> int:
    """Four bytes for each weight of a GGUF file, and the tokenizer, whose texts are larger as JSON.

    Raises:
        ModelError: the file is no complete GGUF file.
    """
    from gguf import GGUFReader  # noqa: PLC0415  (needed once for each file)

    try:
        num_weights = sum(int(tensor.n_elements) for tensor in GGUFReader(file).tensors)
    except (ValueError, IndexError, OSError, KeyError) as error:
        raise ModelError(f"{file} cannot be read as a GGUF file ({error}): see whether it is complete") from error
    return 4 * num_weights + _TOKENIZER_BYTES


def _from_hub(name: str, progress: Callable[[str], None]) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415  (half a second that only hub models need)
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    repository, _, revision = name.partition("@")
    progress(f"downloading {repository} from the Hugging Face hub (or finding it in its cache)")
    try:
        folder = snapshot_download(repository, revision=revision or None, allow_patterns=_HUB_PATTERNS)
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"cannot get {repository} from the Hugging Face hub: {reason.rstrip('.')}."
            " Without a network, copy the model's folder here and give its path with --model."
        ) from error
    return _checked_folder(Path(folder), progress)
