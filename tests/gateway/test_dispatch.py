"""The dispatcher over a real bus, with scripted workers on the other side."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from bus_workers import HEARTBEAT_S, BusWorker, running, token_at, until

from pdserve.bus.bus import Bus
from pdserve.bus.registry import RegistryView
from pdserve.errors import InvalidRequestError, OverloadedError, UnavailableError
from pdserve.gateway.dispatch import Dispatcher
from pdserve.gateway.door import DoorLimits
from pdserve.gateway.outcomes import RetryLimits
from pdserve.gateway.pump import WaitLimits
from pdserve.gateway.request import Event, FailedEvent, FinishedEvent, Generation, GenerationRequest, TokensEvent
from pdserve.local.redis_server import RedisServer
from pdserve.messages import DecodeJob, PrefillJob, Roster, RosterItem, SequenceTokens, TokenBatch
from pdserve.registration import Role
from pdserve.sampling_params import SamplingParams

RETRY = RetryLimits(max_attempts=3, kv_lease_s=10.0, progress_timeout_s=20.0, roster_grace_s=2 * HEARTBEAT_S)
_numbers = itertools.count()


class Recorder:
    """What the dispatcher tells a metrics library."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []
        self.load: dict[str, int] = {}

    def predicted_cached_tokens(self, num_tokens: int) -> None:
        self.told.append(("predicted", num_tokens))

    def shed(self, reason: str) -> None:
        self.told.append(("shed", reason))

    def cancelled(self, reason: str) -> None:
        self.told.append(("cancelled", reason))

    def redispatched(self, phase: str, reason: str) -> None:
        self.told.append(("redispatched", phase, reason))

    def dropped_tokens(self, num_tokens: int) -> None:
        self.told.append(("dropped", num_tokens))

    def diverged(self) -> None:
        self.told.append(("diverged",))

    def set_load(self, *, queued_requests: int, queued_tokens: int, inflight: int, held: int) -> None:
        self.load = {
            "queued_requests": queued_requests,
            "queued_tokens": queued_tokens,
            "inflight": inflight,
            "held": held,
        }


class Service:
    """A gateway's dispatcher and the bus that workers use."""

    def __init__(self, url: str, recorder: Recorder, **changes: object) -> None:
        self.bus, self.workers_bus = Bus(url, "test", timeout_s=1.0), Bus(url, "test", timeout_s=1.0)
        self.view = RegistryView(self.bus, heartbeat_s=HEARTBEAT_S / 2)
        self.recorder = recorder
        values = {"retry_limits": RETRY, "observer": recorder, **changes}
        self.dispatcher = Dispatcher(self.bus, self.view, "f", gateway_id="gw", **values)  # type: ignore[arg-type]

    def worker(self, role: Role, worker_id: str, **knobs: object) -> BusWorker:
        return BusWorker(self.workers_bus, role, worker_id, **knobs)  # type: ignore[arg-type]

    def pair(self) -> tuple[BusWorker, BusWorker]:
        return self.worker(Role.PREFILL, "P"), self.worker(Role.DECODE, "D")

    async def until_known(self, *workers: BusWorker) -> None:
        await until(lambda: {worker.worker_id for worker in workers} <= set(self.view.workers))


@asynccontextmanager
async def service(url: str, **changes: object) -> AsyncIterator[Service]:
    one = Service(url, Recorder(), **changes)
    await one.bus.start()
    await one.workers_bus.start()
    tasks = [asyncio.create_task(one.view.run()), asyncio.create_task(one.dispatcher.run())]
    try:
        yield one
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await one.bus.close()
        await one.workers_bus.close()


def request(max_tokens: int = 8, n: int = 1, num_prompt: int = 40, **changes: object) -> GenerationRequest:
    now_s = time.monotonic()
    number = next(_numbers)
    values = {
        "request_id": f"r{number}",
        "prompt_token_ids": [number, *range(1, num_prompt)],
        "n": n,
        "sampling": SamplingParams(seed=1, max_tokens=max_tokens),
        "deadline_s": now_s + 20.0,
        "received_s": now_s,
    }
    return GenerationRequest(**{**values, **changes})  # type: ignore[arg-type]


async def collect(generation: Generation) -> list[Event]:
    events: list[Event] = []
    while ready := await generation.next_events():
        events.extend(ready)
    return events


def text_of(events: list[Event], choice: int = 0) -> list[int]:
    tokens: list[int] = []
    for event in events:
        if isinstance(event, TokensEvent) and event.choice == choice:
            assert event.index == len(tokens), "lost, doubled or reordered"
            tokens.extend(event.token_ids)
    return tokens


def answer(num_tokens: int) -> list[int]:
    return [token_at(index) for index in range(num_tokens)]


# --- the good way


async def test_a_request_passes_both_workers_and_every_token_arrives_once(redis_url: str) -> None:
    async with service(redis_url) as s:
        p, d = s.pair()
        async with running(p, d):
            await s.until_known(p, d)
            assert s.dispatcher.is_ready
            generation = s.dispatcher.submit(request(max_tokens=8))
            events = await collect(generation)
            assert text_of(events) == answer(8)
            assert events[-1] == FinishedEvent(0, "length", None, 8)
            assert await generation.next_events() == []
            [prefill_job], [decode_job] = p.jobs, d.jobs
            assert isinstance(prefill_job, PrefillJob)
            assert isinstance(decode_job, DecodeJob)
            assert (decode_job.prefill_worker_id, decode_job.key) == ("P", prefill_job.key)
            assert s.dispatcher.num_inflight == 0
            assert s.recorder.told == [("predicted", 0)]


async def test_the_waterfall_carries_what_workers_measured_and_adds_up(redis_url: str) -> None:
    async with service(redis_url) as s:
        p, d = s.pair()
        async with running(p, d):
            await s.until_known(p, d)
            generation = s.dispatcher.submit(request(max_tokens=4))
            await generation.next_events()
            generation.note_first_write()
            await collect(generation)
            timing = generation.waterfall.as_timing()
            stages = [timing[name] for name in ("frontend_s", "queue_s", "schedule_s", "prefill_s", "publish_s")]
            assert sum(stages) == timing["ttft_s"]
            assert timing["ttft_s"] + timing["decode_s"] == timing["total_s"]
            assert (timing["schedule_s"], timing["prefill_s"]) == pytest.approx((1e-4, 2e-4), abs=1e-5)
            assert (timing["transfer_s"], timing["transfer_bytes"]) == (0.003, 64)
            assert timing["handoff_gap_s"] > 0
            [record] = generation.timeline.attempts.values()
            assert (record.prefill, record.decode, record.reason) == ("P", "D", "")
            names = [name for name, _ in generation.timeline.events]
            assert names == ["queued", "dispatched", "started", "handed_off", "first_token", "finished"]


async def test_max_tokens_1_never_involves_a_decode_worker(redis_url: str) -> None:
    async with service(redis_url) as s:
        p, d = s.pair()
        async with running(p, d):
            await s.until_known(p, d)
            events = await collect(s.dispatcher.submit(request(max_tokens=1)))
            assert text_of(events) == answer(1)
            assert d.jobs == []


async def test_all_choices_go_to_the_same_prefill_worker_and_none_is_missing(redis_url: str) -> None:
    async with service(redis_url) as s:
        workers = [s.worker(Role.PREFILL, f"P{i}") for i in range(3)] + [s.worker(Role.DECODE, "D")]
        async with running(*workers):
            await s.until_known(*workers)
            events = await collect(s.dispatcher.submit(request(max_tokens=5, n=4)))
            for choice in range(4):
                assert text_of(events, choice) == answer(5)
            assert sorted(len(worker.jobs) for worker in workers[:3]) == [0, 0, 4]
            assert sum(isinstance(event, FinishedEvent) for event in events) == 4


async def test_without_disaggregation_the_decode_worker_does_it_alone(redis_url: str) -> None:
    async with service(redis_url, disaggregation="never") as s:
        d = s.worker(Role.DECODE, "D")
        async with running(d):
            await s.until_known(d)
            assert s.dispatcher.is_ready
            events = await collect(s.dispatcher.submit(request(max_tokens=5)))
            assert text_of(events) == answer(5)
            [job] = d.jobs
            assert isinstance(job, DecodeJob)
            assert job.prefill_worker_id is None


async def test_dispatching_takes_less_than_a_millisecond(redis_url: str) -> None:
    async with service(redis_url) as s:
        p, d = s.pair()
        async with running(p, d):
            await s.until_known(p, d)
            times = []
            for _ in range(40):
                one = request(max_tokens=2, num_prompt=200)
                start_s = time.perf_counter()
                generation = s.dispatcher.submit(one)
                times.append(time.perf_counter() - start_s)
                await collect(generation)
            assert statistics.median(times) < 1e-3


async def test_what_one_bus_entry_brings_wakes_the_client_once(redis_url: str) -> None:
    async with service(redis_url) as s:
        p, d = s.pair()
        d.num_tokens_before_hang = 0
        async with running(p, d):
            await s.until_known(p, d)
            generation = s.dispatcher.submit(request(max_tokens=50))
            assert text_of(await generation.next_events()) == answer(1)
            await until(lambda: d.held)
            [key] = d.held
            for start in range(0, 40, 10):
                tokens = [token_at(index) for index in range(start, start + 10)]
                item = SequenceTokens(**key._asdict(), index=start, token_ids=tokens)
                s.workers_bus.send(s.bus.keys.tokens("gw"), TokenBatch(worker_id="D", generation="1", items=[item]))
            [event] = await generation.next_events()
            assert isinstance(event, TokensEvent)
            assert (event.index, event.token_ids) == (1, answer(40)[1:])
            generation.cancel("client")


async def test_many_requests_at_once_all_get_their_answer(redis_url: str) -> None:
    async with service(redis_url) as s:
        workers = [s.worker(Role.PREFILL, f"P{i}", window=200) for i in range(2)]
        workers += [s.worker(Role.DECODE, f"D{i}", window=40) for i in range(2)]
        async with running(*workers):
            await s.until_known(*workers)
            generations = [s.dispatcher.submit(request(max_tokens=6)) for _ in range(60)]
            for events in await asyncio.gather(*(collect(generation) for generation in generations)):
                assert text_of(events) == answer(6)
            assert all(worker.jobs for worker in workers)
            await until(lambda: s.recorder.load == dict.fromkeys(s.recorder.load, 0))


# --- the door


async def test_without_a_pair_a_new_request_is_503_at_once(redis_url: str) -> None:
    async with service(redis_url) as s:
        p = s.worker(Role.PREFILL, "P")
        async with running(p):
            await s.until_known(p)
            assert not s.dispatcher.is_ready
            assert s.dispatcher.max_total_tokens is None
            with pytest.raises(UnavailableError) as caught:
                s.dispatcher.submit(request())
            assert caught.value.retry_after_s
            assert ("shed", "no_workers") in s.recorder.told


async def test_what_can_never_fit_is_400(redis_url: str) -> None:
    async with service(redis_url) as s:
        p, d = s.pair()
        async with running(p, d):
            await s.until_known(p, d)
            assert s.dispatcher.max_total_tokens == 4000
            with pytest.raises(InvalidRequestError, match=r"3990.*11.*4000"):
                s.dispatcher.submit(request(max_tokens=11, num_prompt=3990))


async def test_a_full_queue_is_429_and_what_waits_goes_when_there_is_room(redis_url: str) -> None:
    async with service(redis_url, door_limits=DoorLimits(max_queue_requests=2)) as s:
        p, d = s.worker(Role.PREFILL, "P", window=10), s.worker(Role.DECODE, "D", num_tokens_before_hang=3, window=1)
        async with running(p, d):
            await s.until_known(p, d)
            first = s.dispatcher.submit(request(max_tokens=6))
            await until(lambda: d.held)
            waiting = [s.dispatcher.submit(request(max_tokens=6)) for _ in range(2)]
            with pytest.raises(OverloadedError):
                s.dispatcher.submit(request(max_tokens=6))
            d.num_tokens_before_hang = None
            for generation in (first, *waiting):
                assert text_of(await collect(generation)) == answer(6)


async def test_held_requests_go_when_the_first_pair_appears(redis_url: str) -> None:
    limits = {"door_limits": DoorLimits(max_held_requests=5), "wait_limits": WaitLimits(is_holding=True)}
    async with service(redis_url, **limits) as s:
        generation = s.dispatcher.submit(request(max_tokens=4))
        await until(lambda: s.recorder.load.get("held") == 1)
        async with running(*s.pair()):
            assert text_of(await collect(generation)) == answer(4)


async def test_held_requests_are_503_when_nobody_comes(redis_url: str) -> None:
    limits = {
        "door_limits": DoorLimits(max_held_requests=5),
        "wait_limits": WaitLimits(is_holding=True, hold_timeout_s=0.3),
    }
    async with service(redis_url, **limits) as s:
        [event] = await collect(s.dispatcher.submit(request()))
        assert isinstance(event, FailedEvent)
        assert event.error.status == 503


# --- trouble


async def test_a_decode_worker_that_dies_in_mid_stream_costs_time_and_no_token(redis_url: str) -> None:
    async with service(redis_url) as s:
        p = s.worker(Role.PREFILL, "P")
        dying, heir = s.worker(Role.DECODE, "D1", num_tokens_before_hang=4), s.worker(Role.DECODE, "D2")
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(running(p, dying))
            await s.until_known(p, dying)
            generation = s.dispatcher.submit(request(max_tokens=10))
            collecting = asyncio.create_task(collect(generation))
            await until(lambda: any(held.next_index == 4 for held in dying.held.values()))
            await stack.enter_async_context(running(heir))
            dying.is_silent = True
            events = await collecting
            assert text_of(events) == answer(10)
            assert p.jobs[-1].prompt_token_ids[-4:] == answer(4)
            assert p.jobs[-1].num_original_prompt_tokens == 40
            assert ("redispatched", "decode", "worker_gone") in s.recorder.told
            reasons = [record.reason for record in generation.timeline.attempts.values()]
            assert reasons == ["worker_gone", ""]


async def test_a_prefill_worker_that_dies_in_mid_prompt_is_replaced(redis_url: str) -> None:
    async with service(redis_url) as s:
        dying, heir, d = s.worker(Role.PREFILL, "P1"), s.worker(Role.PREFILL, "P2"), s.worker(Role.DECODE, "D")
        dying.num_jobs_to_lose = 10**6
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(running(dying, d))
            await s.until_known(dying, d)
            generation = s.dispatcher.submit(request(max_tokens=4))
            await until(lambda: dying.jobs)
            dying.is_silent = True
            await stack.enter_async_context(running(heir))
            assert text_of(await collect(generation)) == answer(4)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_lost_job_is_repaired_by_rosters(redis_url: str, role: Role) -> None:
    async with service(redis_url) as s:
        p, d = s.pair()
        (p if role is Role.PREFILL else d).num_jobs_to_lose = 1
        async with running(p, d):
            await s.until_known(p, d)
            assert text_of(await collect(s.dispatcher.submit(request(max_tokens=4)))) == answer(4)
            assert len(p.jobs) == (2 if role is Role.PREFILL else 1)
            assert len(d.jobs) == (1 if role is Role.PREFILL else 2)


async def test_a_refusing_decode_worker_is_replaced_without_a_second_prefill(redis_url: str) -> None:
    async with service(redis_url) as s:
        p = s.worker(Role.PREFILL, "P")
        decode = [s.worker(Role.DECODE, f"D{i}") for i in range(2)]
        for worker in decode:
            worker.refusals.append("no_capacity")
        async with running(p, *decode):
            await s.until_known(p, *decode)
            pinned = s.dispatcher.submit(request(max_tokens=4, pinned_decode="D0"))
            decode[1].refusals.clear()
            assert text_of(await collect(pinned)) == answer(4)
            assert len(p.jobs) == 1
            assert [len(worker.jobs) for worker in decode] == [1, 1]


async def test_the_only_decode_worker_refusing_for_a_while_fails_nothing(redis_url: str) -> None:
    async with service(redis_url) as s:
        p, d = s.pair()
        d.refusals.extend(["no_capacity"] * 5)
        async with running(p, d):
            await s.until_known(p, d)
            assert text_of(await collect(s.dispatcher.submit(request(max_tokens=20)))) == answer(20)
            assert len(d.jobs) == 6


async def test_a_fatal_verdict_of_the_prefill_worker_is_the_answer_at_once(redis_url: str) -> None:
    async with service(redis_url) as s:
        p, d = s.pair()
        p.fatal = "too_long"
        async with running(p, d):
            await s.until_known(p, d)
            start_s = time.monotonic()
            [event] = await collect(s.dispatcher.submit(request(n=3)))
            assert isinstance(event, FailedEvent)
            assert event.error.status == 400
            assert time.monotonic() - start_s < 2.0
            assert s.dispatcher.num_inflight == 0


async def test_an_error_of_one_choice_ends_the_request_once_and_cancels_the_others(redis_url: str) -> None:
    async with service(redis_url) as s:
        p, d = s.pair()
        d.num_tokens_before_hang = 2
        async with running(p, d):
            await s.until_known(p, d)
            generation = s.dispatcher.submit(request(max_tokens=9, n=3))
            collecting = asyncio.create_task(collect(generation))
            await until(lambda: len(d.held) == 3)
            job = d.jobs[1]
            fatal = BusWorker(s.workers_bus, Role.DECODE, "D", fatal="prefill_failed")
            fatal._take(job)
            events = await collecting
            assert [type(event) for event in events].count(FailedEvent) == 1
            assert isinstance(events[-1], FailedEvent)
            await until(lambda: not d.held or len(d.cancels) >= 2)


async def test_cancel_reaches_the_workers_and_gives_everything_back(redis_url: str) -> None:
    async with service(redis_url) as s:
        p, d = s.pair()
        d.num_tokens_before_hang = 3
        async with running(p, d):
            await s.until_known(p, d)
            generation = s.dispatcher.submit(request(max_tokens=100))
            await until(lambda: any(held.next_index == 3 for held in d.held.values()))
            generation.cancel("client")
            assert await generation.next_events() == []
            await until(lambda: d.cancels)
            assert d.held == {}
            assert s.dispatcher.num_inflight == 0
            assert ("cancelled", "client") in s.recorder.told


async def test_a_choice_that_has_enough_is_cancelled_alone(redis_url: str) -> None:
    async with service(redis_url) as s:
        p, d = s.pair()
        d.num_tokens_before_hang = 3
        async with running(p, d):
            await s.until_known(p, d)
            generation = s.dispatcher.submit(request(max_tokens=6, n=2))
            await until(lambda: [held.next_index for held in d.held.values()] == [3, 3])
            generation.finish_choice(0)
            await until(lambda: [cancel.choice for cancel in d.cancels] == [0])
            d.num_tokens_before_hang = None
            events = await collect(generation)
            assert text_of(events, 1) == answer(6)
            assert text_of(events, 0) == []


async def test_the_deadline_ends_a_request_everywhere_with_an_error(redis_url: str) -> None:
    async with service(redis_url) as s:
        p, d = s.pair()
        d.num_tokens_before_hang = 3
        async with running(p, d):
            await s.until_known(p, d)
            generation = s.dispatcher.submit(request(max_tokens=100, deadline_s=time.monotonic() + 0.4))
            events = await collect(generation)
            assert isinstance(events[-1], FailedEvent)
            assert (events[-1].error.status, text_of(events)) == (504, answer(3))
            await until(lambda: d.cancels)
            assert ("cancelled", "deadline") in s.recorder.told


async def test_what_a_worker_holds_for_nobody_is_cancelled(redis_url: str) -> None:
    async with service(redis_url) as s:
        p, d = s.pair()
        async with running(p, d):
            await s.until_known(p, d)
            orphan = RosterItem(request_id="ghost", choice=0, attempt=1, nonce="n", state="running", next_index=5)
            leased = RosterItem(request_id="ghost", choice=1, attempt=1, nonce="n", state="leased", next_index=5)
            roster = Roster(worker_id="D", generation="1", items=[orphan, leased])
            s.workers_bus.send(s.bus.keys.tokens("gw"), roster)
            await until(lambda: d.cancels)
            assert [cancel.key for cancel in d.cancels] == [orphan.key]


async def test_the_bus_may_restart_empty_in_mid_stream() -> None:
    with RedisServer() as server:
        async with service(server.url, door_limits=DoorLimits(bus_timeout_s=30.0)) as s:
            p, d = s.pair()
            d.num_tokens_before_hang = 4
            async with running(p, d):
                await s.until_known(p, d)
                generation = s.dispatcher.submit(request(max_tokens=10))
                collecting = asyncio.create_task(collect(generation))
                await until(lambda: any(held.next_index == 4 for held in d.held.values()))
                server.stop()
                await until(lambda: not s.bus.is_up)
                late = s.dispatcher.submit(request(max_tokens=3))
                server.start()
                d.num_tokens_before_hang = None
                assert text_of(await collecting) == answer(10)
                assert text_of(await collect(late)) == answer(3)


async def test_a_bus_that_stays_away_is_503_for_new_requests_within_the_bus_timeout() -> None:
    limits = {"door_limits": DoorLimits(bus_timeout_s=0.5), "wait_limits": WaitLimits(bus_timeout_s=0.5)}
    with RedisServer() as server:
        async with service(server.url, **limits) as s:
            p, d = s.pair()
            async with running(p, d):
                await s.until_known(p, d)
                server.stop()
                await until(lambda: not s.bus.is_up)
                [event] = await collect(s.dispatcher.submit(request()))
                assert isinstance(event, FailedEvent)
                assert event.error.status == 503
                with pytest.raises(UnavailableError):
                    s.dispatcher.submit(request())
                assert not s.dispatcher.is_ready


async def test_drain_lets_streams_finish_and_takes_nothing_new(redis_url: str) -> None:
    async with service(redis_url) as s:
        p, d = s.pair()
        async with running(p, d):
            await s.until_known(p, d)
            generation = s.dispatcher.submit(request(max_tokens=20))
            draining = asyncio.create_task(s.dispatcher.drain(10.0))
            await asyncio.sleep(0)
            assert not s.dispatcher.is_ready
            with pytest.raises(UnavailableError):
                s.dispatcher.submit(request())
            assert text_of(await collect(generation)) == answer(20)
            await draining


async def test_drain_ends_what_outlasts_the_grace_period_with_an_error(redis_url: str) -> None:
    async with service(redis_url) as s:
        p, d = s.pair()
        d.num_tokens_before_hang = 2
        async with running(p, d):
            await s.until_known(p, d)
            generation = s.dispatcher.submit(request(max_tokens=20))
            await s.dispatcher.drain(0.3)
            events = await collect(generation)
            assert isinstance(events[-1], FailedEvent)
            assert events[-1].error.status == 503
            assert ("cancelled", "shutdown") in s.recorder.told
            await until(lambda: d.cancels)
