"""`pdserve status [--json]`: the processes of the services that run on this machine, or of one.

A supervisor on this machine knows process ids and restarts, the bus knows generations and who is ready, here or
elsewhere. Both are asked where they exist, and told as one table.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

from pdserve.arguments import CommandParser
from pdserve.errors import BusError, ServiceError
from pdserve.local.service_file import LocalService, read_all
from pdserve.models.resolve import home_folder
from pdserve.registration import GatewayRegistration, WorkerRegistration

Row = dict[str, str | int | None]
_COLUMNS = ("role", "id", "generation", "pid", "url", "metrics_url", "state")
_BUS_TIMEOUT_S = 2.0


def main(argv: list[str]) -> int:
    """Print the table; 0 when every process is ready, else 1."""
    parser = CommandParser(prog="pdserve status", description="The processes of the services that run here.")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument(
        "--service", default=os.environ.get("PDS_SERVICE"), help="name of one service (default: all that run here)"
    )
    parser.add_argument(
        "--redis",
        default=os.environ.get("PDS_REDIS_URL"),
        help="URL of the bus of a service that `pdserve up` did not start",
    )
    options = parser.parse_args(argv)
    rows = [
        row
        for local, name, redis_url in _services(options.service, options.redis)
        for row in _rows(local, name, redis_url)
    ]
    print(json.dumps(rows, indent=2) if options.json else "\n\n".join(_tables(rows)))
    return 0 if rows and all(row["state"] == "ready" for row in rows) else 1


def _services(name: str | None, redis_url: str | None) -> list[tuple[LocalService | None, str, str]]:
    """(what its supervisor says, its name, the URL of its bus) of each service that is meant."""
    if redis_url:
        return [(None, name or "default", redis_url)]
    return [(local, local.service, local.redis_url) for local in find_local(name)]


def _rows(local: LocalService | None, name: str, redis_url: str) -> list[Row]:
    try:
        workers, gateways = asyncio.run(registered(redis_url, name))
    except BusError as error:
        print(f"pdserve status: {error}", file=sys.stderr)
        workers, gateways = [], []
    return [{"service": name, **row} for row in merge(local, workers, gateways)]


def _tables(rows: list[Row]) -> list[str]:
    """A table for each service, under its name where there are several."""
    by_service: dict[str, list[Row]] = {}
    for row in rows:
        by_service.setdefault(str(row["service"]), []).append(row)
    tables = {name: table(own) for name, own in by_service.items()}
    if len(tables) <= 1:
        return list(tables.values()) or [table([])]
    return [f"service {name}\n{shown}" for name, shown in tables.items()]


def find_local(name: str | None) -> list[LocalService]:
    """The services that run on this machine, or the one of this name.

    Raises:
        ServiceError: none runs, or none of that name.
    """
    home = home_folder(os.environ)
    running = read_all(home)
    found = [service for service in running if name in (None, service.service)]
    if found:
        return found
    if name and running:
        names = ", ".join(service.service for service in running)
        raise ServiceError(f"no service {name!r} runs on this machine (running: {names})")
    raise ServiceError("no service runs on this machine; start one with `pdserve up`")


async def registered(url: str, service: str) -> tuple[list[WorkerRegistration], list[GatewayRegistration]]:
    """Who is registered on the bus now.

    Raises:
        BusError: it did not answer.
    """
    from pdserve.bus.bus import Bus  # noqa: PLC0415  --help needs no Redis client
    from pdserve.bus.registry import RegistryView  # noqa: PLC0415

    bus = Bus(url, service, timeout_s=_BUS_TIMEOUT_S)
    view = RegistryView(bus)
    try:
        await view.poll()
    finally:
        await bus.close()
    return list(view.workers.values()), list(view.gateways.values())


def merge(
    local: LocalService | None, workers: list[WorkerRegistration], gateways: list[GatewayRegistration]
) -> list[Row]:
    """One row per process; a supervisor's word on a process that is not running beats an old registration."""
    known = {
        **{gateway.pid: gateway_row(gateway) for gateway in gateways},
        **{worker.pid: worker_row(worker) for worker in workers},
    }
    rows: list[Row] = []
    for process in local.processes if local else ():
        own: Row = {
            "role": process.role,
            "id": process.id,
            "generation": None,
            "pid": process.pid,
            "url": process.url,
            "metrics_url": process.metrics_url,
            "state": process.state,
        }
        told = known.pop(process.pid, None) if process.pid else None
        if told is not None:
            state = told["state"] if process.state == "ready" else process.state
            # own URLs stay: a registration has them as other machines see them
            own |= {"id": told["id"], "generation": told["generation"], "state": state}
        rows.append(own)
    own_ids = {row["id"] for row in rows}
    return [*rows, *(row for row in known.values() if row["id"] not in own_ids)]


def worker_row(worker: WorkerRegistration) -> Row:
    """The row of a worker, as the bus knows it."""
    return {
        "role": worker.role.value,
        "id": worker.worker_id,
        "generation": worker.generation,
        "pid": worker.pid,
        "url": worker.url,
        "metrics_url": f"{worker.url}/metrics",
        "state": worker.state.value,
    }


def gateway_row(gateway: GatewayRegistration) -> Row:
    """The row of a gateway, as the bus knows it."""
    return {
        "role": "gateway",
        "id": gateway.gateway_id,
        "generation": gateway.generation,
        "pid": gateway.pid,
        "url": gateway.url,
        "metrics_url": gateway.metrics_url,
        "state": gateway.state.value,
    }


def table(rows: list[Row]) -> str:
    """The rows as text, with columns as wide as they must be."""
    lines = [list(_COLUMNS), *([str(row[name] if row[name] is not None else "-") for name in _COLUMNS] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS))]
    return "\n".join("  ".join(f"{cell:<{w}}" for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)
