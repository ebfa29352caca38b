"""What both roles do with attempts, in one process: take, refuse, cancel, time out, fail, resend, give up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from one_process import GATEWAY_ID, HEARTBEAT_S, PREFILL_TIMEOUT_S, Sequence, Worker, tokens_of, world
from virtual_time import in_virtual_time, now_s, until

from pdserve.bus.registry import Registry
from pdserve.messages import Failed, Finished, KvRelease, ResendTokens, Roster, TokenBatch
from pdserve.reasons import FailReason
from pdserve.registration import Role

ROLES = pytest.mark.parametrize("role", Role)


def send(sequence: Sequence, worker: Worker, **changes: Any) -> None:
    """A job that the worker computes from its first token."""
    if worker.worker.role is Role.PREFILL:
        sequence.prefill(worker, **changes)
    else:
        sequence.decode(worker, **changes)


async def failure_of(sequence: Sequence) -> Failed:
    await until(lambda: sequence.failures)
    (failed,) = sequence.failures
    return failed


# --- jobs


@in_virtual_time
async def test_a_decode_worker_computes_a_prompt_without_hand_off_itself() -> None:
    async with world() as w:
        d = await w.worker(Role.DECODE, "d")
        sequence = w.gateway.sequence(50, max_tokens=8)
        sequence.decode(d)
        await until(lambda: sequence.is_finished)
        assert sequence.token_ids == tokens_of(sequence.prompt, 8)


@ROLES
@in_virtual_time
async def test_a_doubled_job_is_computed_once(role: Role) -> None:
    async with world() as w:
        worker = await w.worker(role, "w")
        sequence = w.gateway.sequence(20, max_tokens=1)
        for _ in range(3):
            send(sequence, worker)
        await until(lambda: sequence.is_finished)
        send(sequence, worker)
        await asyncio.sleep(2 * HEARTBEAT_S)
        assert len(sequence.heard(Finished)) == 1
        assert worker.counted("pd_worker_jobs_total", result="accepted") == 1
        assert worker.counted("pd_late_messages_dropped_total", reason="stale") == 3


@ROLES
@in_virtual_time
async def test_a_cancel_that_overtakes_its_job_stops_it(role: Role) -> None:
    async with world() as w:
        worker = await w.worker(role, "w")
        sequence = w.gateway.sequence()
        sequence.cancel(worker)
        await asyncio.sleep(100 * HEARTBEAT_S)
        send(sequence, worker)
        await asyncio.sleep(2 * HEARTBEAT_S)
        assert (sequence.token_ids, sequence.failures) == ([], [])
        assert worker.counted("pd_worker_jobs_total", result="accepted") == 0


@ROLES
@in_virtual_time
async def test_a_higher_attempt_ends_the_lower_one_and_never_the_reverse(role: Role) -> None:
    async with world() as w:
        worker = await w.worker(role, "w")
        worker.is_resting = True
        first, second = w.gateway.sequence(20, max_tokens=2), w.gateway.sequence(20, max_tokens=2)
        second.key = first.key._replace(attempt=2, nonce="second")
        send(first, worker)
        await until(worker.worker.attempts.active)
        send(second, worker)
        await until(lambda: [attempt.key for attempt in worker.worker.attempts.active()] == [second.key])
        send(first, worker)
        worker.is_resting = False
        await until(lambda: second.token_ids)
        assert first.token_ids == []
        second.cancel(worker)


@ROLES
@pytest.mark.parametrize(("changes", "reason", "retryable"), [
    ({"fingerprint": "other"}, FailReason.FINGERPRINT, True),
    ({"remaining_s": 0.0}, FailReason.DEADLINE, False),
    ({"prompt_token_ids": []}, FailReason.SCHEMA, False),
    ({"prompt_token_ids": [5, 97], "num_original_prompt_tokens": 2}, FailReason.SCHEMA, False),
    ({"num_original_prompt_tokens": 0}, FailReason.SCHEMA, False),
    ({"prompt_token_ids": [5] * 600}, FailReason.TOO_LONG, False),
], ids=lambda value: str(value)[:40])  # fmt: skip
@in_virtual_time
async def test_a_job_that_cannot_be_served_is_refused_with_the_reason(
    role: Role, changes: dict[str, Any], reason: FailReason, retryable: bool
) -> None:
    async with world() as w:
        worker = await w.worker(role, "w")
        sequence = w.gateway.sequence(20)
        send(sequence, worker, **changes)
        failed = await failure_of(sequence)
        assert (failed.reason, failed.retryable, failed.worker) == (reason, retryable, worker.identity.ref)


@in_virtual_time
async def test_messages_of_the_other_role_are_counted_and_dropped() -> None:
    async with world() as w:
        p, d = await w.pair()
        sequence = w.gateway.sequence()
        sequence.prefill(d)
        sequence.decode(p)
        release = KvRelease(**sequence.key._asdict(), **p.identity.ref._asdict())
        w.gateway.send(d, release)
        await until(lambda: d.counted("pd_late_messages_dropped_total", reason="unknown") == 2)
        await until(lambda: p.counted("pd_late_messages_dropped_total", reason="unknown") == 1)
        assert not p.worker.attempts.active()
        assert not d.worker.attempts.active()


# --- times


@ROLES
@in_virtual_time
async def test_a_prompt_that_is_computed_for_too_long_fails_and_may_be_tried_elsewhere(role: Role) -> None:
    async with world() as w:
        worker = await w.worker(role, "w")
        sequence = w.gateway.sequence(60)
        send(sequence, worker)
        await until(lambda: worker.engine.scheduler.num_waiting_tokens == 60 - 16)
        worker.is_resting = True
        began_s = now_s()
        failed = await failure_of(sequence)
        assert (failed.reason, failed.retryable) == (FailReason.PREFILL_TIMEOUT, True)
        assert PREFILL_TIMEOUT_S - 0.1 <= now_s() - began_s <= PREFILL_TIMEOUT_S + 2 * HEARTBEAT_S


@in_virtual_time
async def test_a_prompt_has_no_time_limit_while_it_waits_nor_once_it_is_computed() -> None:
    async with world() as w:
        d = await w.worker(Role.DECODE, "d")
        decoding, waiting = w.gateway.sequence(10, max_tokens=100), w.gateway.sequence(20, max_tokens=4)
        decoding.decode(d)
        await until(lambda: decoding.token_ids)
        d.is_resting = True
        waiting.decode(d)
        await asyncio.sleep(2 * PREFILL_TIMEOUT_S)
        d.is_resting = False
        await until(lambda: decoding.is_finished and waiting.is_finished)
        assert decoding.failures == waiting.failures == []


@in_virtual_time
async def test_the_prompt_of_a_failed_hand_off_has_the_same_time_limit() -> None:
    async with world() as w:
        p, d = await w.pair()
        sequence = w.gateway.sequence(60)
        d.transports.num_damaged = 1
        sequence.prefill(p)
        await until(lambda: sequence.has_started)
        sequence.decode(d, p)
        await until(lambda: d.engine.scheduler.running)
        assert d.engine.scheduler.num_waiting_tokens > 0
        d.is_resting = True
        failed = await failure_of(sequence)
        assert (failed.reason, failed.retryable) == (FailReason.PREFILL_TIMEOUT, True)


@ROLES
@in_virtual_time
async def test_an_attempt_ends_at_its_deadline(role: Role) -> None:
    async with world() as w:
        worker = await w.worker(role, "w")
        worker.is_resting = True
        sequence = w.gateway.sequence()
        send(sequence, worker, remaining_s=5.0)
        began_s = now_s()
        failed = await failure_of(sequence)
        assert (failed.reason, failed.retryable) == (FailReason.DEADLINE, False)
        assert 5.0 <= now_s() - began_s <= 5.0 + 2 * HEARTBEAT_S


@ROLES
@in_virtual_time
async def test_what_belongs_to_a_gateway_that_is_gone_is_dropped(role: Role) -> None:
    async with world() as w:
        worker = await w.worker(role, "w")
        worker.is_resting = True
        sequence = w.gateway.sequence()
        send(sequence, worker)
        await until(worker.worker.attempts.active)
        await Registry(w.gateway.bus).withdraw_gateway(GATEWAY_ID)
        await until(lambda: not worker.worker.attempts.active(), within_s=6 * HEARTBEAT_S)
        assert sequence.failures == []


# --- ends


@ROLES
@in_virtual_time
async def test_a_step_that_raises_fails_the_attempts_in_it_and_no_other(
    role: Role, caplog: pytest.LogCaptureFixture
) -> None:
    async with world() as w:
        worker = await w.worker(role, "w")
        sequence, later = w.gateway.sequence(20, max_tokens=1), w.gateway.sequence(20, max_tokens=1)
        run = worker.engine.executor.run
        worker.engine.executor.run = lambda batch: 1 / 0
        send(sequence, worker)
        failed = await failure_of(sequence)
        assert (failed.reason, failed.retryable, failed.was_in_step) == (FailReason.STEP_FAILED, True, True)
        assert failed.detail == "ZeroDivisionError"
        worker.engine.executor.run = run
        send(later, worker)
        await until(lambda: later.is_finished)
        assert later.token_ids == tokens_of(later.prompt, 1)


@ROLES
@in_virtual_time
async def test_tokens_that_were_missed_can_be_asked_for_for_three_heartbeats(role: Role) -> None:
    async with world() as w:
        worker = await w.worker(role, "w")
        sequence = w.gateway.sequence(20, max_tokens=1)
        send(sequence, worker)
        await until(lambda: sequence.is_finished)
        wish = ResendTokens(**sequence.key._asdict(), gateway_id=GATEWAY_ID, from_index=0)
        w.gateway.messages.clear()
        w.gateway.send(worker, wish)
        await until(lambda: sequence.is_finished)
        assert sequence.token_ids == tokens_of(sequence.prompt, 1)
        await asyncio.sleep(5 * HEARTBEAT_S)
        w.gateway.messages.clear()
        w.gateway.send(worker, wish)
        await asyncio.sleep(2 * HEARTBEAT_S)
        assert not any(isinstance(message, TokenBatch | Finished) for message in w.gateway.messages)


@in_virtual_time
async def test_every_heartbeat_lists_what_is_held_for_the_gateway() -> None:
    async with world() as w:
        d = await w.worker(Role.DECODE, "d")
        d.is_resting = True
        sequence = w.gateway.sequence()
        sequence.decode(d)
        await until(d.worker.attempts.active)
        w.gateway.messages.clear()
        await asyncio.sleep(3.5 * HEARTBEAT_S)
        rosters = [message for message in w.gateway.messages if isinstance(message, Roster)]
        assert len(rosters) in (3, 4)
        assert all([item.key for item in roster.items] == [sequence.key] for roster in rosters)
        sequence.cancel(d)


@in_virtual_time
async def test_tokens_wait_for_a_gateway_whose_stream_is_full_and_all_arrive() -> None:
    async with world() as w:
        d = await w.worker(Role.DECODE, "d")
        sequence = w.gateway.sequence(10, max_tokens=30)
        sequence.decode(d)
        await until(lambda: len(sequence.token_ids) > 2)
        stream = d.bus.keys.tokens(GATEWAY_ID)
        d.bus._full_streams.add(stream)
        num_tokens = len(sequence.token_ids)
        await asyncio.sleep(0.05)
        assert len(sequence.token_ids) <= num_tokens + 1
        await until(lambda: sequence.is_finished)
        assert sequence.token_ids == tokens_of(sequence.prompt, 30)
