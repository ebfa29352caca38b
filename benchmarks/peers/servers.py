"""Our service beside vLLM's server: the same load through HTTP, one after the other, in turns, all at fp32.

Both are OpenAI-compatible servers on the same cores. What is compared has targets; a lower or higher target for our
time per output token (`TPOT_SLO_S`) moves cores between running streams and waiting prompts.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
from benchmarks.layouts import UP, Layout, Services
from benchmarks.peers.install import PeerError, peers_folder, vllm_python
from benchmarks.report import Row, Target, at_least, at_most, median_row
from benchmarks.service import Figures, merged, rows_of, run_cases

from pdserve.local.plan import step_interval_s

OURS = "pdserve"
DEFAULTS, TUNED = "vllm", "vllm, 256 batched tokens"
_VLLM_SERVERS = {DEFAULTS: [], TUNED: ["--max-num-batched-tokens", "256"]}
_CASES = ("throughput", "interference")
_COMPARISONS: tuple[tuple[str, tuple[str, ...], Target], ...] = (
    ("output throughput", (DEFAULTS, TUNED), at_least(1.5)),
    ("TTFT p50", (DEFAULTS, TUNED), at_most(1.0)),
    ("TTFT p99", (DEFAULTS, TUNED), at_most(0.7)),
    ("ITL p99 while computed", (DEFAULTS,), at_most(1 / 20)),
    ("ITL p99 while computed", (TUNED,), at_most(1 / 8)),
)
"""A metric, the peers with whose better figure ours is compared, and the ratio that is aimed at."""
_START_TIMEOUT_S = 400.0
_VLLM_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "3",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def measure_servers(
    model: Path, tpot_slos_s: Sequence[float], num_runs: int, scale: float, *, has_vllm: bool
) -> list[Row]:
    """All servers in turns.

    Args:
        tpot_slos_s: our service runs once with each; the first is the one that is compared.
        scale: of all numbers of tokens.
    """
    layouts = {_name_of(tpot_slo_s, tpot_slos_s): _layout_for(tpot_slo_s) for tpot_slo_s in tpot_slos_s}
    runs: dict[str, list[Figures]] = {}

    def measure(name: str, url: str) -> None:
        runs.setdefault(name, []).append(asyncio.run(run_cases(url, _CASES, scale)))

    for _ in range(num_runs):
        for name, layout in layouts.items():
            with Services(str(model), [layout]) as services:
                measure(name, services.under(layout).url)
        for name, arguments in _VLLM_SERVERS.items() if has_vllm else ():
            with vllm_server(model, arguments) as url:
                measure(name, url)
    figures = {name: merged(of_engine) for name, of_engine in runs.items()}
    rows = [row for name, of_engine in figures.items() for row in rows_of(name, "fp32", of_engine)]
    return rows + (compared(rows) if has_vllm else [])


def _name_of(tpot_slo_s: float, all_s: Sequence[float]) -> str:
    return OURS if tpot_slo_s == all_s[0] else f"{OURS}, TPOT_SLO_S={tpot_slo_s:g}"


def _layout_for(tpot_slo_s: float) -> Layout:
    return replace(UP, rest_ms=round(1e3 * (step_interval_s(tpot_slo_s, num_prefill=1) or 0.0)))


def compared(rows: Sequence[Row]) -> list[Row]:
    """Ours as a ratio of the better one of some peers."""
    found: Mapping[tuple[str, str], Row] = {(row.engine, row.metric): row for row in rows}
    ratios = []
    for metric, peers, target in _COMPARISONS:
        ours = found[OURS, metric]
        theirs = [found[peer, metric].value for peer in peers]
        ratio = ours.value / (max(theirs) if target.is_minimum else min(theirs))
        ratios.append(
            median_row(OURS, ours.precision, ours.case, f"{metric} / {' or '.join(peers)}", "x", [ratio], target)
        )
    return ratios


@contextmanager
def vllm_server(model: Path, arguments: Sequence[str]) -> Iterator[str]:
    """vLLM's OpenAI-compatible server at its defaults but for `arguments`; yields its URL.

    Raises:
        PeerError: it does not start.
    """
    port = _free_port()
    command = [
        str(vllm_python()),
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        "--port",
        str(port),
    ]
    command += ["--dtype", "float32", "--no-enable-prefix-caching", *arguments]
    log_file = peers_folder() / "vllm-server.log"
    with log_file.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | vllm_env(), start_new_session=True)
        try:
            _wait_until_healthy(f"http://127.0.0.1:{port}", process, log_file)
            yield f"http://127.0.0.1:{port}"
        finally:
            _end_group(process)


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log_file: Path) -> None:
    give_up_s = time.monotonic() + _START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < give_up_s:
        try:
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise PeerError(f"vLLM's server did not start within {_START_TIMEOUT_S:.0f} s; its output is in {log_file}")


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """The server and its engine's process; the session was made for them."""
    for signal_number, patience_s in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(process.pid, signal_number)
            process.wait(patience_s)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def vllm_env() -> dict[str, str]:
    """Settings that make vLLM fast here: its own OpenMP, and tcmalloc where the system has it."""
    environment = vllm_python().parents[1]
    libraries = [*environment.glob("lib/libiomp5.so"), *Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")]
    return _VLLM_ENV | ({"LD_PRELOAD": ":".join(map(str, libraries))} if libraries else {})
