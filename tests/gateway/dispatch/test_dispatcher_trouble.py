"""The dispatcher over a real bus when workers, the bus or clients fail."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

import pytest
from bus_workers import BusWorker, running, until
from dispatching import answer, collect, next_events, request, service, text_of

from pdserve.errors import UnavailableError
from pdserve.gateway.dispatch.admission import AdmissionLimits
from pdserve.gateway.dispatch.dispatch_loop import WaitLimits
from pdserve.gateway.generation.request import FailedEvent
from pdserve.local.redis_server import RedisServer
from pdserve.messages import Roster, RosterItem
from pdserve.readiness import ReadyReason
from pdserve.registration import Role

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
            assert [told[0] for told in s.recorder.told].count("redispatched") == 1


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
            assert await next_events(generation) == []
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
        async with service(server.url, admission_limits=AdmissionLimits(bus_timeout_s=30.0)) as s:
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
    limits = {"admission_limits": AdmissionLimits(bus_timeout_s=0.5), "wait_limits": WaitLimits(bus_timeout_s=0.5)}
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
                assert s.dispatcher.readiness.reason is ReadyReason.BUS_UNREACHABLE


async def test_drain_lets_streams_finish_and_takes_nothing_new(redis_url: str) -> None:
    async with service(redis_url) as s:
        p, d = s.pair()
        async with running(p, d):
            await s.until_known(p, d)
            generation = s.dispatcher.submit(request(max_tokens=20))
            draining = asyncio.create_task(s.dispatcher.drain(10.0))
            await asyncio.sleep(0)
            readiness = s.dispatcher.readiness
            assert (readiness.ready, readiness.reason) == (False, ReadyReason.DRAINING)
            assert readiness.load.num_running == 1
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
