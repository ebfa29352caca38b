"""`pdserve status [--json]`: the processes of a running service.

A supervisor on this machine knows process ids and restarts, the bus knows generations and who is ready, here or
elsewhere. Both are asked where they exist, and told as one table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys

from pdserve.errors import BusError, ServiceError
from pdserve.local.service_file import LocalService, read, read_all
from pdserve.models.resolve import home_folder
from pdserve.registration import GatewayRegistration, WorkerRegistration

Row = dict[str, str | int | None]
_COLUMNS = ("role", "id", "generation", "pid", "url", "metrics_url", "state")
_BUS_TIMEOUT_S = 2.0


def main(argv: list[str]) -> int:
    """Print the table; 0 when every process is ready, else 1."""
    parser = argparse.ArgumentParser(prog="pdserve status", description="The processes of a running service.")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument(
        "--service", default=os.environ.get("PDS_SERVICE"), help="name of the service, where several run here"
    )
    parser.add_argument(
        "--redis",
        default=os.environ.get("PDS_REDIS_URL"),
        help="URL of the bus of a service that `pdserve up` did not start",
    )
    options = parser.parse_args(argv)
    local = None if options.redis else find_local(options.service)
    redis_url = local.redis_url if local else options.redis
    service = local.service if local else options.service or "default"
    try:
        workers, gateways = asyncio.run(registered(redis_url, service))
    except BusError as error:
        print(f"pdserve status: {error}", file=sys.stderr)
        workers, gateways = [], []
    rows = merge(local, workers, gateways)
    print(json.dumps(rows, indent=2) if options.json else table(rows))
    return 0 if rows and all(row["state"] == "ready" for row in rows) else 1


def find_local(name: str | None) -> LocalService:
    """The service that runs on this machine.

    Raises:
        ServiceError: none of that name, or several and none named.
    """
    home = home_folder(os.environ)
    found = [read(home, name)] if name else read_all(home)
    running = [service for service in found if service is not None]
    if len(running) == 1:
        return running[0]
    if running:
        names = ", ".join(service.service for service in running)
        raise ServiceError(f"several services run here ({names}): choose one with --service")
    raise ServiceError(f"no service {name or ''} runs on this machine; start one with `pdserve up`".replace("  ", " "))


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
