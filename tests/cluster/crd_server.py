"""A present-day CRD server (CEL, strict field validation) beside the older full control plane."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

_ETCD, _ETCD_PEER, _PORT = 22379, 22380, 26443


@contextmanager
def crd_server(etcd: Path, binary: Path, folder: Path) -> Iterator[httpx.Client]:
    """HTTP client of the running server; everything ends with the block."""
    folder.mkdir(parents=True)
    urls = [f"http://127.0.0.1:{port}" for port in (_ETCD, _ETCD_PEER)]
    commands = [
        [str(etcd), f"--data-dir={folder}/etcd", f"--listen-client-urls={urls[0]}",
         f"--advertise-client-urls={urls[0]}", f"--listen-peer-urls={urls[1]}", "--unsafe-no-fsync"],
        [str(binary), f"--etcd-servers={urls[0]}", "--bind-address=127.0.0.1", f"--secure-port={_PORT}",
         f"--cert-dir={folder}"],
    ]  # fmt: skip
    with (folder / "server.log").open("wb") as log:
        shim = ["setpriv", "--pdeathsig", "KILL", "--"]
        processes = [
            subprocess.Popen([*shim, *command], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            for command in commands
        ]
    # Its certificate is its own; nobody else listens in this network namespace.
    headers = {"Authorization": "Bearer x"}
    client = httpx.Client(
        base_url=f"https://127.0.0.1:{_PORT}", verify=False, headers=headers, timeout=30, trust_env=False
    )
    try:
        _wait_ready(client, folder)
        yield client
    finally:
        client.close()
        for process in processes:
            process.kill()
            process.wait()


def _wait_ready(client: httpx.Client, folder: Path) -> None:
    give_up_s = time.monotonic() + 60
    while True:
        try:
            if client.get("/readyz").status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < give_up_s, (folder / "server.log").read_text()[-2000:]
        time.sleep(0.1)
