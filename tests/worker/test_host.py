"""The process around a worker, in one process: registration, heartbeat, new generations, drain."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from one_process import BLOCK_SIZE, BUDGET, HEARTBEAT_S, Worker, World, tokens_of, world
from virtual_time import in_virtual_time, now_s, until

from pdserve.messages import Roster
from pdserve.readiness import ReadyReason
from pdserve.reasons import FailReason
from pdserve.registration import Role, WorkerRegistration, WorkerState

TTL_S = 3 * HEARTBEAT_S
ROLES = pytest.mark.parametrize("role", Role)


async def registration_of(worker: Worker) -> WorkerRegistration:
    registration = await worker.registration()
    assert registration is not None
    return registration


async def drained(worker: Worker, timeout_s: float = 30.0, **reason: FailReason) -> float:
    """Stop the worker as a signal does; returns how long it took to leave, in seconds."""
    began_s = now_s()
    worker.stop.set()
    await worker.host.drain(timeout_s, **reason)
    return now_s() - began_s


async def work_of(w: World, worker: Worker) -> None:
    """Let the worker show that it serves under its present name."""
    sequence = w.gateway.sequence(10, max_tokens=1)
    sequence.prefill(worker) if worker.worker.role is Role.PREFILL else sequence.decode(worker)
    await until(lambda: sequence.is_finished)
    assert sequence.token_ids == tokens_of(sequence.prompt, 1)


# --- registration and heartbeat


@ROLES
@in_virtual_time
async def test_a_registration_says_what_the_worker_is_and_what_it_can_take(role: Role) -> None:
    async with world() as w:
        worker = await w.worker(role, "w")
        await asyncio.sleep(2 * HEARTBEAT_S)
        registration = await registration_of(worker)
        assert (registration.ref, registration.role) == (worker.identity.ref, role)
        assert (registration.state, registration.block_size) == (WorkerState.READY, BLOCK_SIZE)
        assert registration.window == (2 * BUDGET if role is Role.PREFILL else 64 - 1)
        assert registration.descriptors == worker.transports.announced()


@in_virtual_time
async def test_the_load_in_a_registration_is_that_of_the_last_heartbeat() -> None:
    async with world() as w:
        d = await w.worker(Role.DECODE, "d")
        d.is_resting = True
        sequence = w.gateway.sequence(20)
        sequence.decode(d)
        await until(d.worker.attempts.active)
        await asyncio.sleep(2 * HEARTBEAT_S)
        load = (await registration_of(d)).load
        assert (load.num_waiting, load.waiting_tokens, load.num_available_blocks) == (1, 20, 63)
        sequence.cancel(d)


@in_virtual_time
async def test_a_worker_stays_registered_for_as_long_as_it_lives_and_no_longer() -> None:
    async with world() as w:
        d = await w.worker(Role.DECODE, "d")
        ref = d.identity.ref
        for _ in range(20):
            await asyncio.sleep(HEARTBEAT_S)
            assert (await registration_of(d)).ref == ref
        await d.die()
        await w.gateway.bus.execute(("ECHO", "alive"))
        await asyncio.sleep(TTL_S)
        assert await w.gateway.bus.execute(("GET", d.bus.keys.worker("d"))) == [None]


@in_virtual_time
async def test_a_server_that_comes_back_empty_hears_of_the_worker_and_its_attempts_again() -> None:
    async with world() as w:
        d = await w.worker(Role.DECODE, "d")
        d.is_resting = True
        ref, sequence = d.identity.ref, w.gateway.sequence()
        sequence.decode(d)
        await until(d.worker.attempts.active)
        w.server.stop()
        await until(lambda: d.host.ready_reason is ReadyReason.BUS_UNREACHABLE)
        w.gateway.messages.clear()
        await asyncio.sleep(1.2 - now_s() % 1)  # heartbeats come at the beginning of a second
        w.server.start()
        await until(lambda: d.bus.is_up)
        await asyncio.sleep(0.05)  # at once, and not with the next heartbeat
        assert (await registration_of(d)).ref == ref
        await until(lambda: [m for m in w.gateway.messages if isinstance(m, Roster) and m.items])
        d.is_resting = False
        await until(lambda: sequence.is_finished)


# --- generations


@ROLES
@pytest.mark.parametrize("loss", ["missing", "foreign", "stood still"])
@in_virtual_time
async def test_a_worker_that_may_have_been_given_up_starts_anew_under_a_new_generation(role: Role, loss: str) -> None:
    async with world() as w:
        worker = await w.worker(role, "w")
        worker.is_resting = True
        sequence, old = w.gateway.sequence(), worker.identity.ref
        sequence.prefill(worker) if role is Role.PREFILL else sequence.decode(worker)
        await until(worker.worker.attempts.active)
        match loss:
            case "missing":
                await worker.parts.registry.withdraw_worker("w")
            case "foreign":
                other = msgspec.structs.replace(await registration_of(worker), generation="other")
                await worker.parts.registry.announce_worker(other, TTL_S)
            case "stood still":
                w.loop.stand_still(TTL_S + HEARTBEAT_S)
        await until(lambda: worker.identity.ref != old and worker.host.ready_reason is ReadyReason.READY)
        worker.is_resting = False
        assert worker.identity.ref.worker_id == "w"
        assert (await registration_of(worker)).ref == worker.identity.ref
        await until(lambda: sequence.failures)
        assert [(f.reason, f.retryable, f.worker) for f in sequence.failures] == [(FailReason.RESTARTING, True, old)]
        assert set(w.wire.sides) == {worker.identity.ref}, "nothing can be read under the old name"
        await work_of(w, worker)


@in_virtual_time
async def test_what_is_sent_to_an_old_generation_is_not_read() -> None:
    async with world() as w:
        d = await w.worker(Role.DECODE, "d")
        old = d.identity.ref
        late = w.gateway.sequence()
        await d.parts.registry.withdraw_worker("d")
        await until(lambda: d.identity.ref != old and d.host.ready_reason is ReadyReason.READY)
        d.identity.generation, new = old.generation, d.identity.generation
        late.decode(d)
        d.identity.generation = new
        await asyncio.sleep(2 * HEARTBEAT_S)
        assert (late.token_ids, late.failures) == ([], [])


@pytest.mark.parametrize("is_another", [False, True], ids=["the same server", "another server"])
@in_virtual_time
async def test_an_outage_of_the_bus_alone_changes_no_generation(is_another: bool) -> None:
    async with world() as w:
        d = await w.worker(Role.DECODE, "d")
        ref = d.identity.ref
        w.server.stop()
        await asyncio.sleep(5 * TTL_S)
        w.server.start() if is_another else w.server.come_back()
        await until(lambda: d.host.ready_reason is ReadyReason.READY)
        await asyncio.sleep(TTL_S)
        assert d.identity.ref == ref


# --- drain


@ROLES
@in_virtual_time
async def test_a_draining_worker_ends_what_it_has_refuses_what_comes_and_leaves(role: Role) -> None:
    async with world() as w:
        worker = await w.worker(role, "w")
        sequence, late = w.gateway.sequence(60, max_tokens=1), w.gateway.sequence()
        send = (lambda s: s.prefill(worker)) if role is Role.PREFILL else (lambda s: s.decode(worker))
        send(sequence)
        await until(worker.worker.attempts.active)
        worker.is_resting = True
        leaving = asyncio.create_task(drained(worker))
        await asyncio.sleep(2 * HEARTBEAT_S)
        assert (await registration_of(worker)).state is WorkerState.DRAINING
        assert worker.host.ready_reason is ReadyReason.DRAINING
        send(late)
        await until(lambda: late.failures)
        assert (late.failures[0].reason, late.failures[0].retryable) == (FailReason.DRAINING, True)
        worker.is_resting = False
        await leaving
        assert sequence.token_ids == tokens_of(sequence.prompt, 1)
        assert await worker.registration() is None


@ROLES
@in_virtual_time
async def test_a_drain_hands_back_what_does_not_end_in_time(role: Role) -> None:
    async with world() as w:
        worker = await w.worker(role, "w")
        sequence = w.gateway.sequence()
        sequence.prefill(worker) if role is Role.PREFILL else sequence.decode(worker)
        await until(worker.worker.attempts.active)
        worker.is_resting = True
        took_s = await drained(worker, timeout_s=5.0)
        assert took_s == pytest.approx(5.0, abs=0.2)
        await until(lambda: sequence.failures)
        assert [(f.reason, f.retryable) for f in sequence.failures] == [(FailReason.DRAINING, True)]
        assert await worker.registration() is None
        assert worker.blocks == {}


@ROLES
@in_virtual_time
async def test_a_worker_that_leaves_for_a_defect_hands_everything_back_at_once_and_says_so(role: Role) -> None:
    async with world() as w:
        worker = await w.worker(role, "w")
        worker.is_resting = True
        sequences = [w.gateway.sequence() for _ in range(3)]
        for sequence in sequences:
            sequence.prefill(worker) if role is Role.PREFILL else sequence.decode(worker)
        await until(lambda: len(worker.worker.attempts.active()) == 3)
        assert await drained(worker, timeout_s=0.0, reason=FailReason.RESTARTING) < 0.2
        await until(lambda: all(sequence.failures for sequence in sequences))
        told = {(f.reason, f.retryable) for sequence in sequences for f in sequence.failures}
        assert told == {(FailReason.RESTARTING, True)}
        assert await worker.registration() is None


@in_virtual_time
async def test_a_draining_prefill_worker_keeps_its_blocks_until_the_decode_worker_has_them() -> None:
    async with world() as w:
        p, d = await w.pair()
        sequence = w.gateway.sequence(30)
        d.transports.holds = True
        sequence.prefill(p)
        await until(lambda: sequence.has_started)
        sequence.decode(d, p)
        await until(lambda: sequence.token_ids and d.transports.reads)
        leaving = asyncio.create_task(drained(p, timeout_s=60.0))
        await asyncio.sleep(14.0)
        assert not leaving.done()
        d.transports.let_go()
        await leaving
        await until(lambda: sequence.is_finished)
        assert sequence.token_ids == tokens_of(sequence.prompt, 6)


@in_virtual_time
async def test_a_drain_without_a_bus_ends_too() -> None:
    async with world() as w:
        d = await w.worker(Role.DECODE, "d")
        w.server.stop()
        assert await drained(d) < 5.0
