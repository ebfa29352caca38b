"""Through how many files of the gateway one chat request runs: `python -m benchmarks.request_trace`.

A gateway on a real bus serves a chat with scripted workers; every call and return inside gateway/ is recorded while one
streamed request of six tokens goes through, HTTP in, template, tokens, dispatch, stream out. A change of file is a
call or return in another file than the one before. Several requests are traced after one that warms up, and the median
by changes counts. What the dispatcher's timer does meanwhile is no part of a request and left out.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import FrameType

import httpx
from prometheus_client import CollectorRegistry

from pdserve.bus.bus import Bus
from pdserve.bus.reader import StreamReader
from pdserve.bus.registry import Registry, RegistryView
from pdserve.gateway.app import create_app
from pdserve.gateway.counting import GatewayCounting
from pdserve.gateway.dispatch.from_settings import dispatcher_from
from pdserve.gateway.generation.request import Sender
from pdserve.gateway.http.system_routes import SystemView
from pdserve.gateway.openai.frontend import Frontend
from pdserve.gateway.text.chat_prompt import ChatPrompts
from pdserve.http_server import HttpServer, listen, url_of
from pdserve.local.redis_server import RedisServer
from pdserve.messages import (
    AnyMessage,
    AttemptMessage,
    DecodeJob,
    Finished,
    Message,
    PrefillJob,
    SequenceTokens,
    Started,
    Timing,
    TokenBatch,
)
from pdserve.metrics.gateway import GatewayMetrics
from pdserve.models.card import ModelCard
from pdserve.models.tiny import make_model
from pdserve.reasons import FinishReason
from pdserve.registration import Role, WorkerLoad, WorkerRegistration, WorkerState
from pdserve.settings import GatewaySettings

NUM_TOKENS = 6
NUM_TRACED = 9
STEP_S = 0.005
GATEWAY_ID = "gateway-traced"
DISPATCHER = "dispatch/dispatcher.py"
TIMER = ("tick", "_tick_forever")
"""Functions of the dispatcher that its timer calls."""
_MARK = "/pdserve/gateway/"


# --- recording


@dataclass
class Trace:
    """The file of each call and return inside the gateway, in order."""

    files: list[str] = field(default_factory=list)
    num_dispatcher_entries: int = 0
    """Calls into the dispatcher's file from another file of the gateway, or from outside."""

    @property
    def num_files(self) -> int:
        """How many files were entered."""
        return len(set(self.files))

    @property
    def num_changes(self) -> int:
        """How often the file changed from one call or return to the next."""
        return sum(before != after for before, after in pairwise(self.files))


class Tracer:
    """Records every thread that starts after `install`, while `trace` is set."""

    def __init__(self) -> None:
        self.trace: Trace | None = None
        self._is_in_timer = False

    def install(self) -> None:
        """Begin to listen in this thread and all later ones."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        trace = self.trace
        if trace is None or event not in ("call", "return"):
            return
        file, name = _file_of(frame), frame.f_code.co_name
        if file == DISPATCHER and name in TIMER:
            self._is_in_timer = event == "call" and name == "tick"
            return
        if file is None or self._is_in_timer:
            return
        trace.files.append(file)
        if event == "call" and file == DISPATCHER and _caller_of(frame) != DISPATCHER:
            trace.num_dispatcher_entries += 1


def _file_of(frame: FrameType | None) -> str | None:
    """The frame's file below gateway/, None for code elsewhere."""
    name = frame.f_code.co_filename if frame is not None else ""
    return name.split(_MARK)[1] if _MARK in name else None


def _caller_of(frame: FrameType) -> str | None:
    return _file_of(frame.f_back)


# --- workers


@dataclass
class ScriptedWorker:
    """A worker on the bus that answers every job with its tokens at once (prefill) or one by one (decode)."""

    bus: Bus
    role: Role
    fingerprint: str

    @property
    def registration(self) -> WorkerRegistration:
        """What it announces: a ready worker with plenty of room."""
        return WorkerRegistration(
            worker_id=self.role.value,
            role=self.role,
            generation="1",
            state=WorkerState.READY,
            pid=1,
            url="",
            model="tiny",
            fingerprint=self.fingerprint,
            kv_signature="kv",
            block_size=16,
            num_blocks=1000,
            max_model_len=2048,
            window=10_000,
            load=WorkerLoad(num_available_blocks=1000),
        )

    async def run(self) -> None:
        """Register once, for long enough, and answer jobs until cancelled."""
        await Registry(self.bus).announce_worker(self.registration, 600.0)
        await StreamReader(self.bus, self.bus.keys.inbox(self.role.value, "1"), self._receive).run()

    def _receive(self, message: AnyMessage) -> None:
        if isinstance(message, PrefillJob):
            self._say(Started(**self._about(message), num_cached_tokens=0, schedule_s=1e-4))
            self._tokens(message, 0, Timing(schedule_s=1e-4, prefill_s=2e-4))
        elif isinstance(message, DecodeJob):
            self._step(message, 0)

    def _step(self, job: DecodeJob, index: int) -> None:
        """One decode step; the first one repeats token 0."""
        self._tokens(job, index, Timing(transfer_s=1e-3, transfer_bytes=64) if index == 0 else None)
        if index + 1 < NUM_TOKENS:
            asyncio.get_running_loop().call_later(STEP_S, self._step, job, index + 1)
        else:
            about = self._about(job)
            self._say(Finished(**about, finish_reason=FinishReason.LENGTH, num_output_tokens=NUM_TOKENS))

    def _tokens(self, job: AttemptMessage, index: int, timing: Timing | None) -> None:
        item = SequenceTokens(**job.key._asdict(), index=index, token_ids=[72 + index], timing=timing)
        self._say(TokenBatch(worker_id=self.role.value, generation="1", items=[item]))

    def _about(self, job: AttemptMessage) -> dict[str, str | int]:
        return {**job.key._asdict(), "worker_id": self.role.value, "generation": "1"}

    def _say(self, message: Message) -> None:
        self.bus.send(self.bus.keys.tokens(GATEWAY_ID), message)


# --- the service


@asynccontextmanager
async def serving(redis_url: str, model: Path) -> AsyncIterator[str]:
    """The URL of a gateway as its process builds it, with one worker of each role."""
    settings = GatewaySettings(redis_url=redis_url, model=str(model))
    card = ModelCard.load(model, served_name="tiny")
    bus, workers_bus = (Bus(redis_url, settings.service, timeout_s=settings.bus_timeout_s) for _ in range(2))
    view = RegistryView(bus, settings.heartbeat_s)
    counting = GatewayCounting(GatewayMetrics(CollectorRegistry(), model="tiny"))
    dispatcher = dispatcher_from(settings, bus, view, Sender(GATEWAY_ID, card.fingerprint), counting)
    is_ready = asyncio.Event()
    view.on_change(lambda: is_ready.set() if dispatcher.readiness.ready else None)
    with ThreadPoolExecutor(2) as executor:
        prompts = ChatPrompts.load(card.path, card.chat_template)
        frontend = Frontend(card, prompts, dispatcher, executor, draw_seed=lambda: 1, observer=counting)
        system = SystemView(readiness=lambda: dispatcher.readiness, render_metrics=lambda: (b"", "text/plain"))
        sock = listen("127.0.0.1", 0)
        server = HttpServer(create_app(frontend, system), sock)
        workers = [ScriptedWorker(workers_bus, role, card.fingerprint) for role in Role]
        await bus.start()
        await workers_bus.start()
        tasks = [asyncio.create_task(part.run()) for part in (server, view, dispatcher, *workers)]
        try:
            await is_ready.wait()
            yield url_of(sock)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await bus.close()
            await workers_bus.close()


async def trace_requests(redis_url: str, model: Path) -> Trace:
    """The request with the median number of changes of file."""
    tracer = Tracer()
    tracer.install()
    traces = []
    async with serving(redis_url, model) as url, httpx.AsyncClient(base_url=url, timeout=30) as client:
        for _ in range(1 + NUM_TRACED):
            tracer.trace = Trace()
            await _chat(client)
            traces.append(tracer.trace)
            tracer.trace = None
    sys.setprofile(None)
    threading.setprofile(None)
    return sorted(traces[1:], key=lambda trace: trace.num_changes)[NUM_TRACED // 2]


async def _chat(client: httpx.AsyncClient) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "How many files does this question pass?"}],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "stream": True,
    }
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.text.endswith("data: [DONE]\n\n"), response.text


def report(trace: Trace) -> str:
    """The counts, and how often each file was entered from another one."""
    entries = Counter(after for before, after in pairwise(["", *trace.files]) if before != after)
    lines = [f"{num:6d}  {file}" for file, num in entries.most_common()]
    return "\n".join(
        [
            f"gateway files entered    {trace.num_files}",
            f"changes of file          {trace.num_changes}",
            f"entries of {DISPATCHER} {trace.num_dispatcher_entries}",
            "",
            *lines,
        ]
    )


def main() -> None:
    """Trace, and print what was counted."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    with RedisServer() as server, tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "tiny", arch="llama", seed=0)
        print(report(asyncio.run(trace_requests(server.url, model))))


if __name__ == "__main__":
    main()
