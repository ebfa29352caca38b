"""The dispatcher over a real bus, with scripted workers on the other side: the good way, and admission."""

from __future__ import annotations

import asyncio
import statistics
import time

import pytest
from bus_workers import running, token_at, until
from dispatching import answer, collect, next_events, request, service, text_of

from pdserve.errors import InvalidRequestError, OverloadedError, UnavailableError
from pdserve.gateway.dispatch.admission import AdmissionLimits
from pdserve.gateway.dispatch.dispatch_loop import WaitLimits
from pdserve.gateway.generation.request import FailedEvent, FinishedEvent, TokensEvent
from pdserve.messages import DecodeJob, PrefillJob, SequenceTokens, TokenBatch
from pdserve.readiness import ReadyReason
from pdserve.registration import Role

# --- the good way


async def test_a_request_passes_both_workers_and_every_token_arrives_once(redis_url: str) -> None:
    async with service(redis_url) as s:
        p, d = s.pair()
        async with running(p, d):
            await s.until_known(p, d)
            assert s.dispatcher.readiness.ready
            generation = s.dispatcher.submit(request(max_tokens=8))
            events = await collect(generation)
            assert text_of(events) == answer(8)
            assert events[-1] == FinishedEvent(0, "length", None, 8)
            assert await next_events(generation) == []
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
            await next_events(generation)
            generation.waterfall.note_first_write(time.monotonic())
            await collect(generation)
            timing = generation.waterfall.as_timing()
            stages = [timing[name] for name in ("frontend_s", "queue_s", "schedule_s", "prefill_s", "publish_s")]
            assert sum(stages) == timing["ttft_s"]
            assert timing["ttft_s"] + timing["decode_s"] == timing["total_s"]
            assert (timing["schedule_s"], timing["prefill_s"]) == pytest.approx((1e-4, 2e-4), abs=1e-5)
            assert (timing["transfer_s"], timing["transfer_bytes"]) == (0.003, 64)
            assert timing["handoff_gap_s"] > 0


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
            assert text_of(await next_events(generation)) == answer(1)
            await until(lambda: d.held)
            [key] = d.held
            for start in range(0, 40, 10):
                tokens = [token_at(index) for index in range(start, start + 10)]
                item = SequenceTokens(**key._asdict(), index=start, token_ids=tokens)
                s.workers_bus.send(s.bus.keys.tokens("gw"), TokenBatch(worker_id="D", generation="1", items=[item]))
            [event] = await next_events(generation)
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


# --- admission


async def test_without_a_pair_a_new_request_is_503_at_once(redis_url: str) -> None:
    async with service(redis_url) as s:
        p = s.worker(Role.PREFILL, "P")
        async with running(p):
            await s.until_known(p)
            assert s.dispatcher.readiness.reason is ReadyReason.NO_WORKERS
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
    async with service(redis_url, admission_limits=AdmissionLimits(max_queue_requests=2)) as s:
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
    limits = {"admission_limits": AdmissionLimits(max_held_requests=5), "wait_limits": WaitLimits(is_holding=True)}
    async with service(redis_url, **limits) as s:
        generation = s.dispatcher.submit(request(max_tokens=4))
        await until(lambda: s.recorder.load.get("held") == 1)
        async with running(*s.pair()):
            assert text_of(await collect(generation)) == answer(4)


async def test_held_requests_are_503_when_nobody_comes(redis_url: str) -> None:
    limits = {
        "admission_limits": AdmissionLimits(max_held_requests=5),
        "wait_limits": WaitLimits(is_holding=True, hold_timeout_s=0.3),
    }
    async with service(redis_url, **limits) as s:
        [event] = await collect(s.dispatcher.submit(request()))
        assert isinstance(event, FailedEvent)
        assert event.error.status == 503
