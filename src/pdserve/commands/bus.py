"""`pdserve bus tail [--raw] [--count N]` shows messages, `pdserve bus send FILE` injects them.

FILE (or `-`) holds JSON lines `{"stream": "inbox:<worker>:<generation>", "message": {"type": "Cancel", …}}`,
as `tail --raw` prints them. Nothing is sent unless every line is right. See docs/bus.md for all fields.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from pdserve.arguments import perhaps
from pdserve.bus.bus import Bus
from pdserve.bus.keys import Keys
from pdserve.bus.tail import Line, as_json_line, as_text, watch
from pdserve.errors import BusError, PdserveError, SettingError
from pdserve.local.service_file import read_all
from pdserve.log import setup_logging
from pdserve.models.resolve import home_folder
from pdserve.settings import BusSettings, load

_USAGE = """usage: pdserve bus tail [--raw] [--count N] [--redis URL] [--service NAME]
       pdserve bus send FILE [--redis URL] [--service NAME]

tail shows every message of the service until Ctrl-C (or N messages); --raw prints JSON lines that send takes.
send puts the messages of FILE (JSON lines, - for standard input) on the bus.
Without --redis the service that `pdserve up` runs on this machine is meant."""


def main(argv: list[str]) -> int:
    """0 when all went well, 1 on an error, 2 on wrong usage."""
    if {"--help", "-h"} & set(argv):
        print(_USAGE)
        return 0
    action, words = (argv[0], argv[1:]) if argv else ("", [])
    if action not in ("tail", "send"):
        typed = (
            f"there is no action {action!r}{perhaps(action, ('tail', 'send'))}" if action else "an action is missing"
        )
        print(f"pdserve bus: {typed}\n{_USAGE}", file=sys.stderr)
        return 2
    try:
        if action == "tail":
            return _tail(words)
        return _send(words)
    except PdserveError as error:
        print(f"pdserve bus: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return 0


def _tail(words: list[str]) -> int:
    is_raw = "--raw" in words
    count = _take_count(words)
    settings = _settings([word for word in words if word != "--raw"])
    asyncio.run(_show(settings, is_raw, count))
    return 0


def _take_count(words: list[str]) -> int | None:
    if "--count" not in words:
        return None
    position = words.index("--count")
    value = words[position + 1] if position + 1 < len(words) else ""
    del words[position : position + 2]
    if not value.isdigit() or int(value) == 0:
        raise SettingError("--count", value, "a whole number > 0")
    return int(value)


async def _show(settings: BusSettings, is_raw: bool, count: int | None) -> None:
    bus = Bus(settings.redis_url, settings.service, timeout_s=settings.bus_timeout_s)
    num_shown = 0
    try:
        async for seen in watch(bus):
            print(as_json_line(seen) if is_raw else as_text(seen, bus.keys.prefix), flush=True)
            num_shown += 1
            if num_shown == count:
                return
    finally:
        await bus.close()


def _send(words: list[str]) -> int:
    if not words or (words[0].startswith("--")):
        raise SettingError("FILE", words[0] if words else None, "a file of JSON lines, or - for standard input")
    settings = _settings(words[1:])
    lines = _read_lines(words[0], Keys(settings.service))
    asyncio.run(_put(settings, lines))
    print(f"sent {len(lines)} messages")
    return 0


def _read_lines(path: str, keys: Keys) -> list[Line]:
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise PdserveError(f"cannot read {path}: {error.strerror}") from error
    lines: list[Line] = []
    for number, raw in enumerate(text.splitlines(), start=1):
        if raw.strip():
            try:
                line = msgspec.json.decode(raw, type=Line)
            except msgspec.MsgspecError as error:
                raise PdserveError(f"{path}, line {number}: {error}; nothing was sent") from error
            lines.append(msgspec.structs.replace(line, stream=keys.prefix + line.stream.removeprefix(keys.prefix)))
    return lines


async def _put(settings: BusSettings, lines: list[Line]) -> None:
    bus = Bus(settings.redis_url, settings.service, timeout_s=settings.bus_timeout_s)
    try:
        await bus.start()
        if not bus.is_up:
            raise BusError(f"the bus did not answer within {settings.bus_timeout_s:g} s")
        for line in lines:
            bus.send(line.stream, line.message)
        await bus.flush()
        if bus.num_refused_messages:
            raise BusError(f"{bus.num_refused_messages} entries were refused: their key is no stream")
    finally:
        await bus.close()


def _settings(words: list[str]) -> BusSettings:
    words = ["--redis-url" if word == "--redis" else word for word in words]  # as `pdserve up` calls it
    settings = load(BusSettings, words, os.environ, _local_service(os.environ))
    setup_logging(settings.log_level, settings.log_format, process="bus")
    return settings


def _local_service(env: Mapping[str, str]) -> dict[str, object]:
    services = read_all(home_folder(env))
    named = [service for service in services if service.service == env.get("PDS_SERVICE", service.service)]
    return {"redis_url": named[0].redis_url, "service": named[0].service} if len(named) == 1 else {}
