"""How a model's makers want it sampled: the defaults that `generation_config.json` gives to requests that name none."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pdserve.errors import ModelError
from pdserve.models.fields.check import check_generation
from pdserve.models.fields.config_fields import GENERATION

T = TypeVar("T")


@dataclass(frozen=True)
class SamplingDefaults:
    """Sampling parameters of a request that is silent about them."""

    temperature: float = 1.0
    """0: the likeliest token."""
    top_k: int = 0
    """0 and -1: off."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None
    """The limit of a chat's answer; None: all that is left of the context."""


USUAL = SamplingDefaults()
"""What servers of this API do when neither client nor model says anything."""


def read_sampling_defaults(folder: Path) -> SamplingDefaults:
    """The defaults of a model folder; those of a server where it does not say.

    `do_sample: false` means the likeliest token, whatever the temperature; a file without it samples.

    Raises:
        ModelError: the file is unreadable, a value is out of range, or a field would change answers and is not served.
    """
    file, content = _saying(folder)
    check_generation(content, file)
    values = _Values(file, content)
    is_sampled = values.take("do_sample", True, _boolean, "true or false")
    temperature = values.take("temperature", USUAL.temperature, _number(0.0), "a number of at least 0")
    return SamplingDefaults(
        temperature=temperature if is_sampled else 0.0,
        top_k=values.take("top_k", USUAL.top_k, _integer(-1), "a whole number of at least -1"),
        top_p=values.take("top_p", USUAL.top_p, _number(0.0, 1.0, is_low_open=True), "a number in (0, 1]"),
        min_p=values.take("min_p", USUAL.min_p, _number(0.0, 1.0), "a number in [0, 1]"),
        repetition_penalty=values.take(
            "repetition_penalty", USUAL.repetition_penalty, _number(0.0, is_low_open=True), "a number above 0"
        ),
        max_tokens=values.take("max_new_tokens", USUAL.max_tokens, _integer(1), "a whole number of at least 1"),
    )


def _saying(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The file that says how to sample, and its fields: older folders have them in config.json."""
    file = folder / "generation_config.json"
    if file.is_file():
        return file, _read(file)
    config = folder / "config.json"
    content = _read(config) if config.is_file() else {}
    return config, {name: value for name, value in content.items() if name in GENERATION}


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {file}: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"cannot read {file}: expected a JSON object")
    return content


@dataclass(frozen=True)
class _Values:
    """The fields of one file; null is as good as absent."""

    file: Path
    content: dict[str, Any]

    def take(self, name: str, default: T, read: Callable[[object], T | None], expected: str) -> T:
        """One field; `read` makes None of a wrong value."""
        given = self.content.get(name)
        if given is None:
            return default
        value = read(given)
        if value is None:
            shown = repr(given)[:60]
            raise ModelError(
                f"{self.file}: {name} must be {expected}, not {shown}; correct it, or set GENERATION_CONFIG to off"
            )
        return value


def _boolean(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _integer(low: int) -> Callable[[object], int | None]:
    def read(value: object) -> int | None:
        is_good = isinstance(value, int) and not isinstance(value, bool) and low <= value < 2**31
        return value if is_good and isinstance(value, int) else None

    return read


def _number(low: float, high: float = 1e9, *, is_low_open: bool = False) -> Callable[[object], float | None]:
    def read(value: object) -> float | None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return float(value) if low <= value <= high and not (is_low_open and value == low) else None

    return read
