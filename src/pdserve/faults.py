"""Test hooks: delays and faults that a test switches on in a running process. Off, they do not exist.

They exist only when PDS_FAULTS is `1` or a JSON object; the object has these fields, all optional:

    start_delay_s, prefill_delay_s, step_delay_s, pull_delay_s, publish_delay_s    seconds
    fail        {stage: lookup|connect|post|copy|verify|notify, times}
    drop, duplicate, reorder   {message: a message type, times}
    delay       {message, s, times}
    corrupt_block              {times}

`times` counts down; without it a fault never ends. A fault may also be a list of such objects.
Thread-safe: the event loop, the engine's thread and the transfer threads all ask.
"""

from __future__ import annotations

import difflib
import enum
import json
import logging
import math
import threading
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from pdserve.errors import SettingError
from pdserve.messages import AnyMessage

_log = logging.getLogger(__name__)

DELAYS = ("start", "prefill", "step", "pull", "publish")
STAGES = ("lookup", "connect", "post", "copy", "verify", "notify")
MESSAGE_TYPES = tuple(cls.__name__ for cls in typing.get_args(AnyMessage))

_FIELDS: dict[str, tuple[str, ...]] = {
    "fail": ("stage",),
    "drop": ("message",),
    "duplicate": ("message",),
    "reorder": ("message",),
    "delay": ("message", "s"),
    "corrupt_block": (),
}
"""Required fields of each countable fault, beside `times`."""
_NUMBERS = tuple(f"{name}_delay_s" for name in DELAYS)


class MessageAction(enum.StrEnum):
    """What happens to one message on its way out."""

    DROP = "drop"
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    """It is sent after the next message to the same stream."""
    DELAY = "delay"


@dataclass(frozen=True, slots=True)
class MessageFault:
    """A decision about one message."""

    action: MessageAction
    delay_s: float = 0.0


@dataclass(slots=True)
class _Counted:
    """One fault and how often it may still happen; None = for ever."""

    values: dict[str, Any]
    times_left: int | None

    def take(self) -> bool:
        if self.times_left is None:
            return True
        self.times_left -= 1
        return self.times_left >= 0

    def shown(self) -> dict[str, Any]:
        left = None if self.times_left is None else max(0, self.times_left)
        return self.values | {"times_left": left}


class Faults:
    """The faults that are switched on in one process, and how often each may still happen."""

    def __init__(self, obj: Mapping[str, Any] | None = None) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[str, float] = {}
        self._counted: dict[str, list[_Counted]] = {}
        self._were_lists: frozenset[str] = frozenset()
        self.put(obj or {})

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Self | None:
        """The hooks, or None when PDS_FAULTS is unset (or 0).

        Raises:
            SettingError: PDS_FAULTS is neither 1 nor a valid object, or PDS_PRODUCTION forbids it.
        """
        text = env.get("PDS_FAULTS", "").strip()
        if text in ("", "0"):
            return None
        if env.get("PDS_PRODUCTION", "").strip().lower() not in ("", "0", "false", "off"):
            raise SettingError("PDS_FAULTS", text, "not to be set, because PDS_PRODUCTION is")
        faults = cls({} if text == "1" else _parse_json(text))
        _log.warning("TEST HOOKS ARE ON (PDS_FAULTS=%s): this process breaks on demand, never use it for real", text)
        return faults

    def put(self, obj: Mapping[str, Any]) -> None:
        """Replace all faults; all counts start anew. On an error nothing changes.

        Raises:
            SettingError: names the field, its value and what was expected.
        """
        if not isinstance(obj, Mapping):
            raise SettingError("PDS_FAULTS", obj, "a JSON object")
        for name in obj:
            if name not in _NUMBERS and name not in _FIELDS:
                raise SettingError(f"PDS_FAULTS.{name}", obj[name], _one_of(name, (*_NUMBERS, *_FIELDS)))
        numbers = {name: _number(name, obj[name]) for name in _NUMBERS if obj.get(name) is not None}
        counted = {name: _counted(name, obj[name]) for name in _FIELDS if obj.get(name) is not None}
        with self._lock:
            self._numbers, self._counted = numbers, counted
            self._were_lists = frozenset(name for name in counted if isinstance(obj[name], list))

    def get(self) -> dict[str, Any]:
        """The current object; every counted fault carries `times_left` (null = for ever)."""
        with self._lock:
            shown = {name: [fault.shown() for fault in faults] for name, faults in self._counted.items()}
            return self._numbers | {
                name: faults if name in self._were_lists else faults[0] for name, faults in shown.items()
            }

    def delay_s(self, name: str) -> float:
        """How long to wait now: start, prefill, step, pull or publish."""
        name = name.removesuffix("_delay_s")
        assert name in DELAYS, f"unknown delay {name!r}, known are {DELAYS}"
        return self._numbers.get(f"{name}_delay_s", 0.0)

    def should_fail(self, stage: str) -> bool:
        """Whether this stage of a KV transfer fails now; counts it."""
        assert stage in STAGES, f"unknown stage {stage!r}, known are {STAGES}"
        return self._take("fail", "stage", stage) is not None

    def take(self, name: str) -> bool:
        """Whether a fault without a subject (corrupt_block) happens now; counts it."""
        assert _FIELDS.get(name) == (), f"{name!r} is no fault without a subject"
        return self._take(name) is not None

    def on_message(self, message_type: str) -> MessageFault | None:
        """What happens to a message of this type now; counts it. None: it is sent as ever."""
        if not self._counted:
            return None
        for action in MessageAction:
            values = self._take(action.value, "message", message_type)
            if values is not None:
                return MessageFault(action, float(values.get("s", 0.0)))
        return None

    def _take(self, name: str, field: str | None = None, subject: str | None = None) -> dict[str, Any] | None:
        with self._lock:
            for fault in self._counted.get(name, ()):
                if (field is None or fault.values[field] == subject) and fault.take():
                    return fault.values
        return None


def _parse_json(text: str) -> Mapping[str, Any]:
    try:
        obj = json.loads(text)
    except ValueError as error:
        raise SettingError("PDS_FAULTS", text, f"1 or a JSON object ({error})") from error
    if not isinstance(obj, dict):
        raise SettingError("PDS_FAULTS", text, "1 or a JSON object")
    return obj


def _one_of(value: object, options: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(str(value), options, n=1)
    return f"one of {', '.join(options)}" + (f" (did you mean {close[0]}?)" if close else "")


def _number(name: str, value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= typing.cast(float, value) < math.inf:
        raise SettingError(f"PDS_FAULTS.{name}", value, "a number of seconds >= 0")
    return float(typing.cast(float, value))


def _counted(name: str, value: object) -> list[_Counted]:
    items = value if isinstance(value, list) else [value]
    if not items:
        raise SettingError(f"PDS_FAULTS.{name}", value, "an object, or a list of at least one")
    return [_one_counted(name, item) for item in items]


def _one_counted(name: str, item: object) -> _Counted:
    path, required = f"PDS_FAULTS.{name}", _FIELDS[name]
    if not isinstance(item, dict):
        raise SettingError(path, item, f"an object with {', '.join((*required, 'times'))}")
    values = {key: value for key, value in item.items() if key != "times_left"}  # so that GET's answer can be PUT
    for key, given in values.items():
        if key not in (*required, "times"):
            raise SettingError(f"{path}.{key}", given, _one_of(key, (*required, "times")))
    for key in required:
        if key not in values:
            raise SettingError(f"{path}.{key}", None, "a value")
    _check_subject(path, values)
    times = values.get("times")
    if times is not None and (not isinstance(times, int) or isinstance(times, bool) or times < 0):
        raise SettingError(f"{path}.times", times, "a whole number >= 0")
    return _Counted(values, times)


def _check_subject(path: str, values: dict[str, Any]) -> None:
    for key, options in (("stage", STAGES), ("message", MESSAGE_TYPES)):
        if key in values and values[key] not in options:
            raise SettingError(f"{path}.{key}", values[key], _one_of(values[key], options))
    if "s" in values:
        values["s"] = _number(f"{path.removeprefix('PDS_FAULTS.')}.s", values["s"])
