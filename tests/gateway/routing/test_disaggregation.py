"""Who computes a prompt: the pure choice, the settings behind it, and the dispatcher that obeys it."""

from __future__ import annotations

import pytest
from attempt_bench import LIMITS, Bench, D
from bus_workers import running, token_at
from dispatching import answer, collect, next_events, request, service, text_of

from pdserve.errors import InvalidRequestError, SettingError, UnavailableError
from pdserve.gateway.dispatch.from_settings import disaggregation_from
from pdserve.gateway.routing.router import Disaggregation
from pdserve.messages import DecodeJob, PrefillJob
from pdserve.registration import Role
from pdserve.settings import GatewaySettings, load

NEVER = Disaggregation("never")


def test_never_is_local_and_always_is_not() -> None:
    assert NEVER.is_local(request(max_tokens=1))
    assert not Disaggregation("always", min_remote_tokens=1000).is_local(request(num_prompt=2))


@pytest.mark.parametrize(("num_prompt", "is_local"), [(1, True), (39, True), (40, False), (400, False)])
def test_auto_hands_over_only_prompts_that_are_long_enough(num_prompt: int, is_local: bool) -> None:
    assert Disaggregation("auto", min_remote_tokens=40).is_local(request(num_prompt=num_prompt)) is is_local
    assert not Disaggregation("auto").is_local(request(num_prompt=num_prompt)), "unless told so, none is short"


def test_auto_leaves_a_single_token_and_a_pinned_prompt_to_prefill_workers() -> None:
    auto = Disaggregation("auto", min_remote_tokens=1000)
    assert not auto.is_local(request(max_tokens=1))
    assert not auto.is_local(request(pinned_prefill="P"))


def test_the_settings_say_which() -> None:
    flags = ["--disaggregation", "auto", "--min-remote-tokens", "64"]
    assert disaggregation_from(load(GatewaySettings, flags)) == Disaggregation("auto", 64)
    assert disaggregation_from(load(GatewaySettings)) == Disaggregation("auto", 0)


def test_decode_workers_that_must_not_prefill_are_not_asked_to() -> None:
    flags = ["--local-prefill", "never", "--min-remote-tokens", "64"]
    assert not disaggregation_from(load(GatewaySettings, flags)).is_local(request(num_prompt=2))
    with pytest.raises(SettingError, match=r"LOCAL_PREFILL.*DISAGGREGATION"):
        disaggregation_from(load(GatewaySettings, ["--local-prefill=never", "--disaggregation=never"]))


# --- the dispatcher


async def test_without_disaggregation_the_decode_worker_does_it_alone(redis_url: str) -> None:
    async with service(redis_url, disaggregation=NEVER) as s:
        d = s.worker(Role.DECODE, "D")
        async with running(d):
            await s.until_known(d)
            assert s.dispatcher.readiness.ready
            events = await collect(s.dispatcher.submit(request(max_tokens=5)))
            assert text_of(events) == answer(5)
            [job] = d.jobs
            assert isinstance(job, DecodeJob)
            assert job.prefill_worker_id is None


async def test_without_disaggregation_no_prefill_worker_is_asked(redis_url: str) -> None:
    async with service(redis_url, disaggregation=NEVER) as s:
        p, d = s.pair()
        async with running(p, d):
            await s.until_known(p, d)
            for max_tokens in (1, 5):
                events = await collect(s.dispatcher.submit(request(max_tokens=max_tokens, n=2)))
                assert text_of(events, 1) == answer(max_tokens)
            assert p.jobs == []
            assert len(d.jobs) == 4


async def test_what_decode_workers_alone_can_never_hold_is_400(redis_url: str) -> None:
    async with service(redis_url, disaggregation=NEVER) as s:
        d = s.worker(Role.DECODE, "D")
        async with running(d):
            await s.until_known(d)
            assert s.dispatcher.max_total_tokens == 4000
            with pytest.raises(InvalidRequestError, match=r"3990.*11.*4000"):
                s.dispatcher.submit(request(max_tokens=11, num_prompt=3990))


async def test_without_disaggregation_prefill_workers_alone_are_nobody(redis_url: str) -> None:
    async with service(redis_url, disaggregation=NEVER) as s:
        p = s.worker(Role.PREFILL, "P")
        async with running(p):
            await s.until_known(p)
            assert not s.dispatcher.readiness.ready
            with pytest.raises(UnavailableError):
                s.dispatcher.submit(request())


async def test_short_prompts_go_one_way_and_long_ones_the_other(redis_url: str) -> None:
    async with service(redis_url, disaggregation=Disaggregation("auto", min_remote_tokens=40)) as s:
        p, d = s.pair()
        async with running(p, d):
            await s.until_known(p, d)
            short, long = s.dispatcher.submit(request(num_prompt=39)), s.dispatcher.submit(request(num_prompt=40))
            for generation in (short, long):
                assert text_of(await collect(generation)) == answer(8)
            [prefill_job] = p.jobs
            assert isinstance(prefill_job, PrefillJob)
            assert prefill_job.request_id == long.request.request_id
            by_request = {job.request_id: job for job in d.jobs if isinstance(job, DecodeJob)}
            assert by_request[short.request.request_id].prefill_worker_id is None
            assert by_request[long.request.request_id].prefill_worker_id == "P"


async def test_a_decode_worker_that_dies_over_its_own_prompt_costs_no_token(redis_url: str) -> None:
    async with service(redis_url, disaggregation=NEVER) as s:
        dying, heir = s.worker(Role.DECODE, "D1", num_tokens_before_hang=3), s.worker(Role.DECODE, "D2")
        async with running(dying):
            await s.until_known(dying)
            generation = s.dispatcher.submit(request(max_tokens=8))
            events = await next_events(generation)
            async with running(heir):
                await s.until_known(heir)
                dying.is_silent = True
                events += await collect(generation)
        assert text_of(events) == answer(8)
        [job] = heir.jobs
        assert isinstance(job, DecodeJob)
        assert job.prefill_worker_id is None
        assert job.prompt_token_ids[-1] == token_at(2), "it goes on behind what was emitted"


# --- the state machine


def test_a_long_prompt_is_no_standstill_of_the_decode_worker_that_computes_it() -> None:
    b = Bench()
    b.machine.dispatch_local(D, 0.0, 0)
    for now_s in range(1, 70):
        assert b.at(float(now_s)).roster(D, "running") == []
        assert b.tick() == [], f"given up after {now_s} s"
    assert b.at(69.0 + LIMITS.progress_timeout_s + 1).tick(), "silence is one"


def test_a_decode_worker_that_has_computed_its_prompt_shows_progress_by_tokens_alone() -> None:
    b = Bench()
    b.machine.dispatch_local(D, 0.0, 0)
    b.at(1.0).tokens(0, 10, worker=D)
    for now_s in range(2, 21):
        b.at(float(now_s)).roster(D, "running", 1)
    assert b.at(1.0 + LIMITS.progress_timeout_s + 0.1).tick(), "it claims to run and sends nothing"
