"""Looks over the shoulders of all readers of a service, for people. Reads streams, removes nothing.

Readers remove what they processed within about a second, so an entry is seen while this runs, and older
ones are not. JSON lines `{"stream", "id", "message"}` are what `pdserve bus send` takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec

from pdserve.bus.bus import Bus
from pdserve.bus.client import Command, connect
from pdserve.bus.registry import RegistryView
from pdserve.errors import BusError
from pdserve.messages import AnyMessage, decode

BLOCK_S = 0.2
MAX_SHOWN_ITEMS = 6


@dataclass(frozen=True, slots=True)
class Seen:
    """One message, or an entry that cannot be read."""

    stream: str
    entry_id: str
    message: AnyMessage | None
    payload: bytes
    error: str = ""


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message as a JSON line, out of `tail --raw` and into `send`."""

    stream: str
    message: AnyMessage
    id: str = ""


async def watch(bus: Bus) -> AsyncIterator[Seen]:
    """Every message on every stream of the registered workers and gateways, until cancelled.

    Raises:
        BusError: the bus went away.
    """
    view, positions = RegistryView(bus), dict[str, str]()
    connection = connect(bus.server, timeout_s=bus.timeout_s)
    try:
        while True:
            await view.poll()
            positions = {stream: positions.get(stream, "0") for stream in _streams(bus, view)}
            if not positions:
                await asyncio.sleep(BLOCK_S)
                continue
            block_ms = int(1000 * BLOCK_S)
            command: Command = ("XREAD", "BLOCK", block_ms, "STREAMS", *positions, *positions.values())
            limit_s = bus.timeout_s + BLOCK_S
            (reply,) = await connection.run([command], timeout_s=limit_s, transaction=False)
            for stream, entries in reply or ():
                for entry_id, fields in entries:
                    positions[stream.decode()] = entry_id.decode()
                    for seen in _read(stream.decode(), entry_id.decode(), fields.get(b"m", b"")):
                        yield seen
    finally:
        await connection.close()


def _streams(bus: Bus, view: RegistryView) -> list[str]:
    inboxes = [bus.keys.inbox(*worker.ref) for worker in view.workers.values()]
    return inboxes + [bus.keys.tokens(gateway_id) for gateway_id in view.gateways]


def _read(stream: str, entry_id: str, payload: bytes) -> list[Seen]:
    try:
        return [Seen(stream, entry_id, message, payload) for message in decode(payload)]
    except BusError as error:
        return [Seen(stream, entry_id, None, payload, str(error))]


def as_json_line(seen: Seen) -> str:
    """The whole message, for machines and for `send`."""
    if seen.message is None:
        return msgspec.json.encode(
            {"stream": seen.stream, "id": seen.entry_id, "error": seen.error, "payload": seen.payload.hex()}
        ).decode()
    return msgspec.json.encode(Line(seen.stream, seen.message, seen.entry_id)).decode()


def as_text(seen: Seen, prefix: str) -> str:
    """One line for people: long lists are cut."""
    where = seen.stream.removeprefix(prefix)
    if seen.message is None:
        return f"{seen.entry_id} {where}  unreadable: {seen.error}"
    fields = msgspec.to_builtins(seen.message)
    name = fields.pop("type")
    shown = " ".join(f"{key}={_short(value)}" for key, value in fields.items())
    return f"{seen.entry_id} {where}  {name} {shown}"


def _short(value: Any) -> str:
    if isinstance(value, list) and len(value) > MAX_SHOWN_ITEMS:
        shown = ", ".join(_short(item) for item in value[:MAX_SHOWN_ITEMS])
        return f"[{shown}, … {len(value)} in all]"
    if isinstance(value, list):
        return f"[{', '.join(_short(item) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_short(item)}" for key, item in value.items()) + "}"
    return str(value)
