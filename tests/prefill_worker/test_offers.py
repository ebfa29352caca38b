"""What a prefill worker answers to decode workers, in one process: whom it lends blocks to, for how long, and not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from one_process import BUDGET, HEARTBEAT_S, LEASE_S, Sequence, Worker, World, world
from virtual_time import in_virtual_time, until

from pdserve.bus.reader import StreamReader
from pdserve.messages import AnyMessage, Cancel, KvFailed, KvReady, KvRelease, KvWant, LeaseItem, LeaseRenewal
from pdserve.registration import Role, WorkerRef


class Reader:
    """Speaks for a decode worker, and hears what the prefill worker answers."""

    def __init__(self, w: World, worker_id: str) -> None:
        self.ref = WorkerRef(worker_id, "1")
        self.heard: list[AnyMessage] = []
        self._gateway = w.gateway
        self._bus = w.gateway.bus
        self.reader = StreamReader(self._bus, self._bus.keys.inbox(*self.ref), self.heard.append)

    def want(self, sequence: Sequence, p: Worker, **changes: Any) -> None:
        fields = sequence.key._asdict() | {"kv_signature": "signature", "backend": "wire"} | changes
        self._gateway.send(p, KvWant(**fields, **self.ref._asdict()))

    def release(self, sequence: Sequence, p: Worker, *, is_complete: bool = True) -> None:
        message = KvRelease(**sequence.key._asdict(), **self.ref._asdict(), is_complete=is_complete)
        self._gateway.send(p, message)

    def renew(self, sequence: Sequence, p: Worker, *, num_announced_blocks: int = 0, has_token0: bool = False) -> None:
        item = LeaseItem(**sequence.key._asdict(), num_announced_blocks=num_announced_blocks, has_token0=has_token0)
        self._gateway.send(p, LeaseRenewal(**self.ref._asdict(), items=[item]))

    @property
    def blocks(self) -> set[int]:
        """Indices of the blocks that were announced."""
        ready = [message for message in self.heard if isinstance(message, KvReady)]
        return {m.first_block_index + index for m in ready for index in range(len(m.block_ids))}

    @property
    def has_token0(self) -> bool:
        return any(isinstance(message, KvReady) and message.token0 is not None for message in self.heard)

    async def refusal(self) -> str:
        await until(lambda: any(isinstance(message, KvFailed) for message in self.heard))
        (failed,) = [message for message in self.heard if isinstance(message, KvFailed)]
        return str(failed.reason)


@contextlib.asynccontextmanager
async def readers(w: World, *names: str) -> AsyncIterator[list[Reader]]:
    made = [Reader(w, name) for name in names]
    tasks = [asyncio.create_task(each.reader.run()) for each in made]
    yield made
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@in_virtual_time
async def test_finished_blocks_are_announced_with_the_chunk_that_completes_them_and_token_0_with_the_last() -> None:
    async with world() as w, readers(w, "d") as (d,):
        p = await w.worker(Role.PREFILL, "p")
        sequence = w.gateway.sequence(40)
        sequence.prefill(p)
        await until(lambda: sequence.has_started)
        p.is_resting = True
        d.want(sequence, p)
        await until(lambda: d.blocks == {0, 1, 2, 3})
        assert not d.has_token0
        p.is_resting = False
        await until(lambda: d.blocks == set(range(8)))
        await until(lambda: d.blocks == set(range(10)) and d.has_token0)
        d.release(sequence, p)


@in_virtual_time
async def test_a_late_reader_hears_of_everything_at_once() -> None:
    async with world() as w, readers(w, "d") as (d,):
        p = await w.worker(Role.PREFILL, "p")
        sequence = w.gateway.sequence(40)
        sequence.prefill(p)
        await until(lambda: sequence.token_ids)
        await asyncio.sleep(LEASE_S / 2)
        d.want(sequence, p)
        await until(lambda: d.blocks == set(range(10)) and d.has_token0)
        assert len(d.heard) == 1
        d.release(sequence, p)


@in_virtual_time
async def test_blocks_for_which_no_reader_comes_are_freed_when_their_lease_ends() -> None:
    async with world() as w:
        p = await w.worker(Role.PREFILL, "p")
        sequence = w.gateway.sequence(40)
        sequence.prefill(p)
        await until(lambda: sequence.token_ids)
        await asyncio.sleep(LEASE_S - HEARTBEAT_S)
        assert p.blocks == {"leased": 10}
        await asyncio.sleep(3 * HEARTBEAT_S)
        assert (p.blocks, p.worker.num_held) == ({}, 0)


@pytest.mark.parametrize(("changes", "reason"), [
    ({"nonce": "forged"}, "nonce"),
    ({"kv_signature": "other"}, "geometry"),
    ({"request_id": "never heard of"}, "unknown"),
])  # fmt: skip
@in_virtual_time
async def test_a_want_that_does_not_fit_is_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    async with world() as w, readers(w, "d") as (d,):
        p = await w.worker(Role.PREFILL, "p")
        sequence = w.gateway.sequence(40)
        sequence.prefill(p)
        await until(lambda: sequence.token_ids)
        d.want(sequence, p, **changes)
        assert await d.refusal() == reason
        assert p.counted("pd_handoff_rejected_total", reason=reason) == 1
        assert p.transports.allowed.keys() <= {sequence.key.nonce}
        sequence.cancel(p)


@pytest.mark.parametrize("how", ["cancelled", "released", "finished with token 0"])
@in_virtual_time
async def test_a_want_for_what_is_over_is_stale(how: str) -> None:
    async with world() as w, readers(w, "d") as (d,):
        p = await w.worker(Role.PREFILL, "p")
        sequence = w.gateway.sequence(40, max_tokens=1 if how == "finished with token 0" else 6)
        sequence.prefill(p)
        await until(lambda: sequence.token_ids)
        if how == "cancelled":
            sequence.cancel(p)
        elif how == "released":
            d.want(sequence, p)
            await until(lambda: d.has_token0)
            d.release(sequence, p)
        await w.until_nothing_is_held()
        d.want(sequence, p)
        assert await d.refusal() == "stale"


@in_virtual_time
async def test_only_the_reader_of_an_offer_can_release_or_renew_it() -> None:
    async with world() as w, readers(w, "d", "stranger") as (d, stranger):
        p = await w.worker(Role.PREFILL, "p")
        sequence = w.gateway.sequence(40)
        sequence.prefill(p)
        d.want(sequence, p)
        await until(lambda: sequence.token_ids)
        d.want(sequence, p)
        await until(lambda: d.has_token0)
        stranger.release(sequence, p)
        stranger.renew(sequence, p)
        assert await stranger.refusal() == "stale"
        assert p.blocks == {"leased": 10}
        d.release(sequence, p)


@in_virtual_time
async def test_a_renewal_brings_again_what_the_reader_did_not_hear() -> None:
    async with world() as w, readers(w, "d") as (d,):
        p = await w.worker(Role.PREFILL, "p")
        sequence = w.gateway.sequence(40)
        sequence.prefill(p)
        await until(lambda: sequence.token_ids)
        d.want(sequence, p)
        await until(lambda: d.has_token0)
        d.heard.clear()
        d.renew(sequence, p, num_announced_blocks=10, has_token0=True)
        await asyncio.sleep(0.5)
        assert d.heard == []
        d.renew(sequence, p, num_announced_blocks=7)
        await until(lambda: d.blocks == {7, 8, 9} and d.has_token0)
        d.release(sequence, p)


@in_virtual_time
async def test_a_renewal_of_what_has_ended_is_told_as_unknown() -> None:
    async with world() as w, readers(w, "d") as (d,):
        p = await w.worker(Role.PREFILL, "p")
        d.renew(w.gateway.sequence(), p)
        assert await d.refusal() == "unknown"


@in_virtual_time
async def test_a_cancelled_prompt_that_is_being_read_stays_leased_until_its_reader_lets_go() -> None:
    async with world() as w, readers(w, "d") as (d,):
        p = await w.worker(Role.PREFILL, "p")
        sequence = w.gateway.sequence(60)
        sequence.prefill(p)
        await until(lambda: sequence.has_started)
        d.want(sequence, p)
        await until(lambda: d.blocks)
        sequence.cancel(p)
        await until(lambda: not p.worker.attempts.active())
        await asyncio.sleep(2 * HEARTBEAT_S)
        assert set(p.blocks) == {"leased"}
        d.release(sequence, p, is_complete=False)
        await w.until_nothing_is_held()


@pytest.mark.parametrize("max_tokens", [1, 6], ids=["token 0 is the last", "more follow"])
@in_virtual_time
async def test_a_cancel_during_the_step_of_token_0_leaves_what_is_being_read_to_its_reader(max_tokens: int) -> None:
    async with world() as w, readers(w, "d") as (d,):
        p = await w.worker(Role.PREFILL, "p")
        sequence = w.gateway.sequence(2 * BUDGET, max_tokens=max_tokens)
        sequence.prefill(p)
        await until(lambda: sequence.has_started)
        p.is_resting = True
        d.want(sequence, p)
        await until(lambda: d.blocks)
        p.engine_thread.turn()  # the last chunk; its output is told to the worker after the Cancel
        p.worker.handle(Cancel(**sequence.key._asdict()))
        p.is_resting = False
        await asyncio.sleep(2 * HEARTBEAT_S)
        assert set(p.blocks) == {"leased"}
        assert sequence.key.nonce in p.transports.allowed, "the reader may go on"
        d.release(sequence, p, is_complete=False)
        await w.until_nothing_is_held()


@pytest.mark.parametrize(("integrity", "num_digests"), [("full", 10), ("off", 0)])
@in_virtual_time
async def test_digests_are_announced_only_with_integrity(integrity: str, num_digests: int) -> None:
    async with world() as w, readers(w, "d") as (d,):
        p = await w.worker(Role.PREFILL, "p", INTEGRITY=integrity)
        sequence = w.gateway.sequence(40)
        sequence.prefill(p)
        await until(lambda: sequence.token_ids)
        d.want(sequence, p)
        await until(lambda: d.has_token0)
        assert sum(len(message.digests) for message in d.heard if isinstance(message, KvReady)) == num_digests
        d.release(sequence, p)


@in_virtual_time
async def test_a_lease_stands_still_while_no_renewal_could_arrive() -> None:
    """A prefill worker that cannot hear must not take its decode worker for dead."""
    async with world() as w, readers(w, "d") as (d,):
        p = await w.worker(Role.PREFILL, "p")
        sequence = w.gateway.sequence(40)
        sequence.prefill(p)
        d.want(sequence, p)
        await until(lambda: sequence.token_ids)
        w.server.stop()
        await asyncio.sleep(3 * LEASE_S)
        assert set(p.blocks) == {"leased"}
        w.server.start()
        await asyncio.sleep(LEASE_S + 3 * HEARTBEAT_S)
        assert p.blocks == {}
