"""Hand-offs between a prefill and a decode worker in one process: the good way, cancels, lost messages, failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from one_process import HANDOFF_TIMEOUT_S, HEARTBEAT_S, LEASE_S, Sequence, Worker, tokens_of, world
from virtual_time import in_virtual_time, now_s, until

from pdserve.readiness import ReadyReason
from pdserve.registration import Role

MESSAGES = ("KvWant", "KvReady", "KvRelease")


async def begin(sequence: Sequence, p: Worker, d: Worker) -> None:
    """Send both jobs, the second one when the prompt is being computed."""
    sequence.prefill(p)
    await until(lambda: sequence.has_started)
    sequence.decode(d, p)


def is_announced(sequence: Sequence, d: Worker) -> bool:
    """Whether the decode worker READs, in READs that are held, every block of the prompt, and so knows token 0."""
    return 4 * sum(len(read.local_ids) for read in d.transports.reads.values()) >= len(sequence.prompt)


async def finish(sequence: Sequence) -> None:
    """Wait for the end; its tokens must be those of one engine alone."""
    await until(lambda: sequence.is_finished or sequence.failures)
    assert sequence.failures == []
    await until(lambda: len(sequence.token_ids) == sequence.max_tokens)
    assert sequence.token_ids == tokens_of(sequence.prompt, sequence.max_tokens)


# --- the good way


@pytest.mark.parametrize("num_prompt_tokens", [1, 3, 4, 16, 40, 63])
@in_virtual_time
async def test_a_hand_off_gives_the_tokens_of_one_engine_alone(num_prompt_tokens: int) -> None:
    async with world() as w:
        p, d = await w.pair()
        sequence = w.gateway.sequence(num_prompt_tokens, max_tokens=9)
        await begin(sequence, p, d)
        await finish(sequence)
        assert d.transports.num_reads > 0


@in_virtual_time
async def test_many_hand_offs_at_once_do_not_mix() -> None:
    async with world() as w:
        p, d = await w.pair()
        sequences = [w.gateway.sequence(20 + number, max_tokens=5) for number in range(5)]
        await asyncio.gather(*(begin(sequence, p, d) for sequence in sequences))
        for sequence in sequences:
            await finish(sequence)


@in_virtual_time
async def test_blocks_that_the_decode_worker_has_cached_are_not_read_again() -> None:
    async with world() as w:
        p, d = await w.pair()
        sequence = w.gateway.sequence(40)
        again = Sequence(w.gateway, sequence.key._replace(request_id="again", nonce="other"), sequence.prompt, 6)
        for each in (sequence, again):
            await begin(each, p, d)
            await finish(each)
            await w.until_nothing_is_held()
        num_bytes = d.metrics.get_sample_value("pd_kv_transfer_bytes_sum", {"backend": "wire"})
        num_blocks = 40 / 4
        assert num_bytes == num_blocks * d.engine.executor.kv_spec.block_bytes


@in_virtual_time
async def test_the_last_token_is_no_reason_for_a_hand_off() -> None:
    async with world() as w:
        p, _ = await w.pair()
        sequence = w.gateway.sequence(10, max_tokens=1)
        sequence.prefill(p, will_decode=False)
        await finish(sequence)


# --- cancels

Phase = Callable[[Sequence, Worker, Worker], object]
PHASES: dict[str, Phase] = {
    "before its blocks are reserved": lambda s, p, d: True,
    "in mid prompt": lambda s, p, d: s.has_started,
    "with the first blocks announced": lambda s, p, d: d.transports.num_reads >= 1,
    "with token 0 known": lambda s, p, d: s.token_ids,
    "decoding": lambda s, p, d: len(s.token_ids) > 3,
    "finished": lambda s, p, d: s.is_finished,
}


@pytest.mark.parametrize(("phase", "holds"), [
    *((phase, False) for phase in PHASES), *((phase, True) for phase in list(PHASES)[:4])
])  # fmt: skip
@in_virtual_time
async def test_a_cancel_in_any_phase_frees_everything_on_both_sides(phase: str, holds: bool) -> None:
    """With `holds`, READs hang: nothing decodes then."""
    async with world() as w:
        p, d = await w.pair()
        sequence = w.gateway.sequence(60, max_tokens=12)
        d.transports.holds = holds
        await begin(sequence, p, d)
        await until(lambda: PHASES[phase](sequence, p, d))
        sequence.cancel(p, d)
        await until(lambda: not d.worker.attempts.active() and not p.worker.attempts.active())
        num_tokens = len(sequence.token_ids)
        if d.transports.reads:
            await asyncio.sleep(3 * HEARTBEAT_S)
            assert set(d.blocks) == {"quarantined"}, "a READ may still write them"
            assert set(p.blocks) == {"leased"}, "a READ may still need them"
        d.transports.let_go()
        began_s = now_s()
        await w.until_nothing_is_held()
        assert now_s() - began_s < LEASE_S / 2, "the decode worker said that it is done"
        assert (sequence.failures, len(sequence.token_ids)) == ([], num_tokens)


@in_virtual_time
async def test_a_cancel_at_the_prefill_worker_alone_does_not_disturb_a_reader() -> None:
    """The gateway cancels at the prefill worker when it has what it needs; blocks are read on."""
    async with world() as w:
        p, d = await w.pair()
        sequence = w.gateway.sequence(20)
        d.transports.holds = True
        await begin(sequence, p, d)
        await until(lambda: is_announced(sequence, d))
        sequence.cancel(p)
        await asyncio.sleep(2 * LEASE_S)
        assert set(p.blocks) == {"leased"}
        d.transports.let_go()
        await finish(sequence)


# --- messages that are lost, doubled, late or overtaken


@pytest.mark.parametrize("fault", [
    {"drop": {"times": 1}}, {"drop": {"times": 2}}, {"duplicate": {}}, {"reorder": {"times": 2}},
    {"delay": {"s": 0.3}}, {"delay": {"s": 3.0, "times": 2}},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("message", MESSAGES)
@in_virtual_time
async def test_a_message_of_a_hand_off_may_be_lost_doubled_or_late(message: str, fault: dict[str, dict]) -> None:
    async with world() as w:
        p, d = await w.pair()
        for worker in (p, d):
            worker.faults.put({name: values | {"message": message} for name, values in fault.items()})
        sequence = w.gateway.sequence(50)
        await begin(sequence, p, d)
        await finish(sequence)


@in_virtual_time
async def test_the_end_of_a_prompt_is_announced_again_when_a_renewal_shows_that_it_was_lost() -> None:
    async with world() as w:
        p, d = await w.pair()
        sequence = w.gateway.sequence(50)
        await begin(sequence, p, d)
        await until(lambda: d.transports.num_reads >= 2)
        p.faults.put({"drop": {"message": "KvReady"}})
        await until(lambda: sequence.token_ids)
        await asyncio.sleep(2 * HEARTBEAT_S)
        assert not sequence.is_finished
        p.faults.put({})
        began_s = now_s()
        await finish(sequence)
        assert now_s() - began_s <= 2 * HEARTBEAT_S


# --- failures


@in_virtual_time
async def test_a_lease_that_is_not_renewed_ends() -> None:
    async with world() as w:
        p, d = await w.pair()
        sequence = w.gateway.sequence(30)
        d.transports.holds = True
        await begin(sequence, p, d)
        await until(lambda: sequence.token_ids and d.transports.reads)
        await d.die()
        await asyncio.sleep(LEASE_S - 2 * HEARTBEAT_S)
        assert set(p.blocks) == {"leased"}
        await asyncio.sleep(3 * HEARTBEAT_S)
        assert p.blocks == {}
        assert p.counted("pd_kv_leases_expired_total") == 1


@in_virtual_time
async def test_a_lease_is_renewed_for_as_long_as_a_read_takes() -> None:
    async with world() as w:
        p, d = await w.pair(HANDOFF_TIMEOUT_S=100.0)
        sequence = w.gateway.sequence(30)
        d.transports.holds = True
        await begin(sequence, p, d)
        await until(lambda: is_announced(sequence, d))
        await asyncio.sleep(4 * LEASE_S)
        d.transports.let_go()
        await finish(sequence)
        assert p.counted("pd_kv_leases_expired_total") == 0


@in_virtual_time
async def test_a_prefill_worker_that_dies_in_mid_prompt_takes_the_hand_off_with_it() -> None:
    async with world() as w:
        p, d = await w.pair()
        sequence = w.gateway.sequence(60)
        await begin(sequence, p, d)
        await until(lambda: d.transports.num_reads >= 1)
        d.transports.holds = True
        await p.die()
        await until(lambda: sequence.failures)
        (failed,) = sequence.failures
        assert (failed.reason, failed.retryable) == ("no_token0", True)
        d.transports.let_go()


@in_virtual_time
async def test_with_token_0_known_the_prompt_of_a_failed_hand_off_is_computed_by_the_decode_worker() -> None:
    async with world() as w:
        p, d = await w.pair()
        sequence = w.gateway.sequence(30)
        d.transports.holds = True
        await begin(sequence, p, d)
        await until(lambda: is_announced(sequence, d))
        await p.die()
        d.transports.let_go()
        await finish(sequence)
        assert d.counted("pd_recomputed_tokens_total") == 30


@pytest.mark.parametrize("local_prefill", ["auto", "never"])
@in_virtual_time
async def test_a_damaged_block_never_becomes_text(local_prefill: str) -> None:
    async with world() as w:
        p, d = await w.pair(LOCAL_PREFILL=local_prefill)
        sequence = w.gateway.sequence(30)
        d.transports.num_damaged = 1
        await begin(sequence, p, d)
        if local_prefill == "auto":
            await finish(sequence)
            assert d.counted("pd_recomputed_tokens_total") == 30
        else:
            await until(lambda: sequence.failures)
            assert [failed.retryable for failed in sequence.failures] == [True]
            assert len(sequence.token_ids) <= 1
        assert d.counted("pd_kv_transfers_total", backend="wire", result="mismatch") == 1


@in_virtual_time
async def test_with_token_0_known_a_damaged_block_is_told_as_such() -> None:
    async with world() as w:
        p, d = await w.pair(LOCAL_PREFILL="never")
        sequence = w.gateway.sequence(30)
        d.transports.holds, d.transports.num_damaged = True, 1
        await begin(sequence, p, d)
        await until(lambda: is_announced(sequence, d))
        d.transports.let_go()
        await until(lambda: sequence.failures)
        assert [(failed.reason, failed.retryable) for failed in sequence.failures] == [("integrity", True)]


@in_virtual_time
async def test_a_decode_worker_without_room_refuses_at_once_and_another_one_takes_the_hand_off() -> None:
    async with world() as w:
        p, small = await w.pair(num_blocks=12)
        large = await w.worker(Role.DECODE, "large")
        busy, sequence = w.gateway.sequence(30, max_tokens=8), w.gateway.sequence(30)
        small.transports.holds = True
        await begin(busy, p, small)
        await until(lambda: small.blocks)
        await begin(sequence, p, small)
        await until(lambda: sequence.failures)
        assert [(failed.reason, failed.retryable) for failed in sequence.failures] == [("no_capacity", True)]
        sequence.decode(large, p)
        await until(lambda: sequence.is_finished)
        assert sequence.token_ids == tokens_of(sequence.prompt, 6)
        small.transports.let_go()
        await finish(busy)


@in_virtual_time
async def test_after_one_decode_worker_gave_up_another_one_can_come_while_the_lease_runs() -> None:
    async with world() as w:
        p, first = await w.pair()
        second = await w.worker(Role.DECODE, "second")
        sequence = w.gateway.sequence(30)
        first.transports.holds = True
        await begin(sequence, p, first)
        await until(lambda: is_announced(sequence, first))
        sequence.cancel(first)
        await until(lambda: not first.worker.attempts.active())
        first.transports.let_go()
        await w.until_nothing_is_held(first)
        sequence.decode(second, p)
        await finish(sequence)


@in_virtual_time
async def test_a_hand_off_that_stands_still_is_given_up() -> None:
    async with world() as w:
        p, d = await w.pair()
        sequence = w.gateway.sequence(60)
        await begin(sequence, p, d)
        await until(lambda: d.transports.num_reads >= 1)
        p.is_resting = True
        began_s = now_s()
        await until(lambda: sequence.failures)
        assert HANDOFF_TIMEOUT_S <= now_s() - began_s <= HANDOFF_TIMEOUT_S + 2 * HEARTBEAT_S
        assert [(failed.reason, failed.retryable) for failed in sequence.failures] == [("no_token0", True)]
        sequence.cancel(p)


@in_virtual_time
async def test_a_job_that_names_an_unknown_or_replaced_prefill_worker_fails_at_once() -> None:
    async with world() as w:
        p, d = await w.pair()
        for changes in ({"prefill_generation": "0ld"}, {"prefill_worker_id": "stranger"}):
            sequence = w.gateway.sequence()
            sequence.decode(d, p, **changes)
            await until(lambda sequence=sequence: sequence.failures, within_s=0.5)
            (failed,) = sequence.failures
            assert (failed.reason, failed.retryable) == ("handoff_failed", True)
            assert "is not registered" in failed.detail


@in_virtual_time
async def test_workers_of_another_kv_signature_exchange_nothing() -> None:
    async with world() as w:
        p, d = await w.pair()
        d.transports.kv_signature = "other"
        sequence = w.gateway.sequence()
        await begin(sequence, p, d)
        await until(lambda: sequence.failures)
        assert "KV signature differs: theirs signature, ours other" in sequence.failures[0].detail
        assert d.transports.num_reads == 0
        sequence.cancel(p)


@in_virtual_time
async def test_the_failure_of_a_prompts_step_is_told_to_both_the_gateway_and_the_reader(caplog) -> None:
    async with world() as w:
        p, d = await w.pair()
        sequence = w.gateway.sequence(60)
        await begin(sequence, p, d)
        await until(lambda: d.transports.num_reads >= 1)
        run, p.engine.executor.run = p.engine.executor.run, lambda batch: 1 / 0
        await until(lambda: len(sequence.failures) == 2)
        p.engine.executor.run = run
        reasons = {failed.worker_id: (failed.reason, failed.retryable) for failed in sequence.failures}
        assert reasons == {"p": ("step_failed", True), "d": ("no_token0", True)}


@pytest.mark.parametrize("role", Role)
@in_virtual_time
async def test_after_a_new_generation_of_either_side_hand_offs_work_again(role: Role) -> None:
    async with world() as w:
        p, d = await w.pair()
        sequence = w.gateway.sequence(60)
        d.transports.holds = True
        await begin(sequence, p, d)
        await until(lambda: d.transports.reads)
        renewed = p if role is Role.PREFILL else d
        old = renewed.identity.ref
        await renewed.parts.registry.withdraw_worker(renewed.identity.worker_id)
        await until(lambda: renewed.identity.ref != old and renewed.host.ready_reason is ReadyReason.READY)
        await until(lambda: sequence.failures)
        d.transports.let_go()
        await w.until_nothing_is_held()
        another = w.gateway.sequence(30)
        await begin(another, p, d)
        await finish(another)
