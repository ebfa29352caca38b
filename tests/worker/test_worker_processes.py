"""Two real worker processes on a real bus; the test plays the gateway, or a decode worker, and misbehaves."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from pdserve.bus.bus import Bus
from pdserve.bus.reader import StreamReader
from pdserve.bus.registry import Registry
from pdserve.local.service import PrivateService
from pdserve.messages import (
    AnyMessage,
    AttemptKey,
    Cancel,
    DecodeJob,
    Failed,
    Finished,
    KvFailed,
    KvReady,
    KvRelease,
    KvWant,
    LeaseItem,
    LeaseRenewal,
    PrefillJob,
    Roster,
    SequenceTokens,
    Started,
    TokenBatch,
)
from pdserve.registration import GatewayRegistration, WorkerRegistration
from pdserve.sampling_params import SamplingParams

M = TypeVar("M")
LEASE_S = 1.5
SETTINGS = {
    "EXECUTOR": "fake",
    "FAKE_ITL_S": 0.01,
    "HEARTBEAT_S": 0.3,
    "KV_LEASE_S": LEASE_S,
    "HANDOFF_TIMEOUT_S": 2,
    "NUM_BLOCKS": 64,
}
IDLE_STATES = {"free", "cached"}


class Bench:
    """The bus as a test sees it: everything that workers said to the gateway `gw` and to the decode worker `spy`."""

    def __init__(self, service: PrivateService, bus: Bus) -> None:
        self.service, self.bus, self.registry = service, bus, Registry(bus)
        self.heard: list[AnyMessage] = []

    async def worker(self, role: str, index: int = 0) -> WorkerRegistration:
        found = await self.registry.worker(f"{role}-{index}")
        assert found is not None, f"{role}-{index} is not registered"
        return found

    def send(self, worker: WorkerRegistration, message: Any) -> None:
        self.bus.send(self.bus.keys.inbox(worker.worker_id, worker.generation), message)

    def prefill_job(self, worker: WorkerRegistration, num_tokens: int, **changes: Any) -> PrefillJob:
        return PrefillJob(**(self._job(worker, num_tokens, 0) | changes))

    def decode_job(self, of: PrefillJob, prefill: WorkerRegistration, **changes: Any) -> DecodeJob:
        fields = {name: getattr(of, name) for name in DecodeJob.__struct_fields__ if hasattr(of, name)}
        fields |= {"prefill_worker_id": prefill.worker_id, "prefill_generation": prefill.generation}
        return DecodeJob(**(fields | changes))

    def _job(self, worker: WorkerRegistration, num_tokens: int, choice: int) -> dict[str, Any]:
        prompt = [secrets.randbelow(200) + 5 for _ in range(num_tokens)]
        return {
            **AttemptKey(secrets.token_hex(4), choice, 1, secrets.token_hex(8))._asdict(),
            "gateway_id": "gw",
            "fingerprint": worker.fingerprint,
            "prompt_token_ids": prompt,
            "num_original_prompt_tokens": num_tokens,
            "sampling": SamplingParams(seed=1, max_tokens=6, temperature=0.0),
            "remaining_s": 30.0,
        }

    async def hear(self, kind: type[M], of: Any, where: Callable[[M], bool] = lambda message: True) -> M:
        """The first message of a kind about an attempt."""

        def found() -> M | None:
            about = (m for m in self.heard if isinstance(m, kind) and getattr(m, "key", None) == of.key and where(m))
            return next(about, None)

        return await self.until(found)

    def tokens(self, of: Any) -> list[SequenceTokens]:
        batches = [message for message in self.heard if isinstance(message, TokenBatch)]
        return [item for batch in batches for item in batch.items if item.key == of.key]

    async def until(self, found: Callable[[], M | None], timeout_s: float = 10.0) -> M:
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            if (result := found()) is not None and result is not False:
                return result
            await asyncio.sleep(0.01)
        raise AssertionError(f"not within {timeout_s} s; heard {[type(m).__name__ for m in self.heard][-20:]}")

    async def ledger(self, role: str) -> dict[str, Any]:
        async with httpx.AsyncClient() as client:
            answer = await client.get(f"{self.service.process(role).url}/debug/kv", timeout=10)
        body: dict[str, Any] = answer.json()
        assert body["ok"], body
        return body

    async def idle(self, role: str, timeout_s: float = 5.0) -> float:
        """Seconds until no block is held any more."""
        began_s = time.monotonic()
        while time.monotonic() - began_s < timeout_s:
            states = (await self.ledger(role))["by_state"]
            if not any(count for state, count in states.items() if state not in IDLE_STATES):
                return time.monotonic() - began_s
            await asyncio.sleep(0.05)
        raise AssertionError(f"{role} still holds {states}")


@pytest.fixture(scope="module")
def service(tiny_model_dir: Path) -> Iterator[PrivateService]:
    with PrivateService(tiny_model_dir, num={"gateway": 0}, settings=SETTINGS) as running:
        yield running


@pytest.fixture
async def bench(service: PrivateService) -> AsyncIterator[Bench]:
    bus = Bus(service.redis_url, "private", timeout_s=2.0)
    await bus.start()
    bench = Bench(service, bus)
    await bench.registry.announce_gateway(
        GatewayRegistration(gateway_id="gw", generation="g", pid=1, url="", metrics_url=""), 600
    )
    readers = [
        asyncio.create_task(StreamReader(bus, stream, bench.heard.append).run())
        for stream in (bus.keys.tokens("gw"), bus.keys.inbox("spy", "s1"))
    ]
    yield bench
    for reader in readers:
        reader.cancel()
    await bus.close()


def want(job: PrefillJob, prefill: WorkerRegistration, **changes: Any) -> KvWant:
    fields: dict[str, Any] = {**job.key._asdict(), "worker_id": "spy", "generation": "s1", "backend": "tcp"}
    return KvWant(**(fields | {"kv_signature": prefill.kv_signature} | changes))


async def test_a_prompt_goes_from_prefill_to_decode_and_leaves_nothing_behind(bench: Bench) -> None:
    prefill, decode = await bench.worker("prefill"), await bench.worker("decode")
    for num_tokens in (1, 15, 16, 17, 100):
        job = bench.prefill_job(prefill, num_tokens)
        bench.send(prefill, job)
        await bench.hear(Started, job)
        bench.send(decode, bench.decode_job(job, prefill))
        finished = await bench.hear(Finished, job)
        assert (finished.finish_reason, finished.num_output_tokens) == ("length", 6)
        told = bench.tokens(job)
        first = {item.token_ids[0] for item in told if item.index == 0}
        assert len(first) == 1, "prefill and decode tell different first tokens"
    await bench.idle("prefill")
    await bench.idle("decode")


async def test_doubled_jobs_compute_and_speak_once(bench: Bench) -> None:
    prefill, decode = await bench.worker("prefill"), await bench.worker("decode")
    job = bench.prefill_job(prefill, 40)
    for _ in range(3):
        bench.send(prefill, job)
    await bench.hear(Started, job)
    for _ in range(3):
        bench.send(decode, bench.decode_job(job, prefill))
    await bench.hear(Finished, job)
    bench.send(decode, bench.decode_job(job, prefill))
    await asyncio.sleep(0.3)
    indices = [index for item in bench.tokens(job) for index in range(item.index, item.index + len(item.token_ids))]
    assert sorted(indices) == [0, 0, 1, 2, 3, 4, 5]  # token 0 from both sides, everything else once
    await bench.idle("prefill")
    await bench.idle("decode")


async def test_blocks_for_which_no_reader_comes_return_after_one_lease(bench: Bench) -> None:
    prefill = await bench.worker("prefill")
    job = bench.prefill_job(prefill, 40)
    bench.send(prefill, job)
    await bench.until(lambda: bench.tokens(job) or None)
    assert (await bench.ledger("prefill"))["by_state"]["leased"] == 3
    assert await bench.idle("prefill") < 2 * LEASE_S + 1


async def test_a_renewed_lease_holds_and_ends_with_the_release(bench: Bench) -> None:
    prefill = await bench.worker("prefill")
    job = bench.prefill_job(prefill, 40)
    bench.send(prefill, job)
    await bench.hear(Started, job)
    bench.send(prefill, want(job, prefill))
    ready = await bench.hear(KvReady, job, lambda message: message.is_last)
    assert len(ready.block_ids) == 3
    item = {**job.key._asdict(), "num_announced_blocks": 3, "has_token0": True}
    for _ in range(6):
        await asyncio.sleep(LEASE_S / 3)
        bench.send(prefill, LeaseRenewal(worker_id="spy", generation="s1", items=[LeaseItem(**item)]))
    assert (await bench.ledger("prefill"))["by_state"]["leased"] == 3
    bench.send(prefill, KvRelease(**job.key._asdict(), worker_id="spy", generation="s1"))
    assert await bench.idle("prefill") < LEASE_S / 2


async def test_a_cancel_alone_does_not_unpin_what_a_peer_may_be_reading(bench: Bench) -> None:
    prefill = await bench.worker("prefill")
    job = bench.prefill_job(prefill, 40)
    bench.send(prefill, job)
    await bench.hear(Started, job)
    bench.send(prefill, want(job, prefill))
    await bench.hear(KvReady, job, lambda message: message.is_last)
    bench.send(prefill, Cancel(**job.key._asdict()))
    await asyncio.sleep(0.3)
    assert (await bench.ledger("prefill"))["by_state"]["leased"] == 3
    bench.send(prefill, KvRelease(**job.key._asdict(), worker_id="spy", generation="s1", is_complete=False))
    assert await bench.idle("prefill") < LEASE_S / 2


async def test_a_lost_announcement_is_repeated_when_a_renewal_shows_the_gap(bench: Bench) -> None:
    prefill = await bench.worker("prefill")
    job = bench.prefill_job(prefill, 40)
    bench.send(prefill, job)
    await bench.hear(Started, job)
    bench.send(prefill, want(job, prefill))
    await bench.hear(KvReady, job, lambda message: message.is_last)
    bench.heard.clear()
    item = LeaseItem(**job.key._asdict(), num_announced_blocks=1, has_token0=False)
    bench.send(prefill, LeaseRenewal(worker_id="spy", generation="s1", items=[item]))
    again = await bench.hear(KvReady, job)
    assert (again.first_block_index, len(again.block_ids), again.is_last) == (1, 2, True)
    assert again.token0 is not None
    bench.send(prefill, KvRelease(**job.key._asdict(), worker_id="spy", generation="s1"))
    await bench.idle("prefill")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"nonce": "guessed"}, "nonce"),
        ({"kv_signature": "model=other"}, "geometry"),
        ({"request_id": "never heard of"}, "unknown"),
    ],
    ids=["foreign nonce", "other KV signature", "unknown request"],
)
async def test_a_wish_that_does_not_fit_is_refused_and_hurts_no_other(
    bench: Bench, changes: dict[str, Any], reason: str
) -> None:
    prefill, decode = await bench.worker("prefill"), await bench.worker("decode")
    job = bench.prefill_job(prefill, 40)
    bench.send(prefill, job)
    await bench.hear(Started, job)
    wish = want(job, prefill, **changes)
    bench.send(prefill, wish)
    assert (await bench.hear(KvFailed, wish)).reason == reason
    bench.send(decode, bench.decode_job(job, prefill))
    await bench.hear(Finished, job)
    await bench.idle("prefill")


async def test_a_decode_worker_without_room_says_so_at_once_and_takes_nothing(bench: Bench) -> None:
    prefill, decode = await bench.worker("prefill"), await bench.worker("decode")
    sampling = SamplingParams(seed=1, max_tokens=300, temperature=0.0, ignore_eos=True)
    big = [bench.prefill_job(prefill, 16 * 40, sampling=sampling) for _ in range(2)]
    for job in big:  # the second one does not fit beside the first
        bench.send(prefill, job)
        await bench.hear(Started, job)
        bench.send(decode, bench.decode_job(job, prefill))
    failures = await bench.until(
        lambda: [m for m in bench.heard if isinstance(m, Failed) and m.reason == "no_capacity"] or None
    )
    assert failures[0].retryable
    for job in big:
        bench.send(prefill, Cancel(**job.key._asdict()))
        bench.send(decode, Cancel(**job.key._asdict()))
    await bench.idle("decode")
    await bench.idle("prefill")


async def test_a_hand_off_from_a_generation_that_is_gone_fails_at_once(bench: Bench) -> None:
    prefill, decode = await bench.worker("prefill"), await bench.worker("decode")
    job = bench.prefill_job(prefill, 20)
    bench.send(decode, bench.decode_job(job, prefill, prefill_generation="0ld"))
    failed = await bench.hear(Failed, job)
    assert (failed.reason, failed.retryable) == ("handoff_failed", True)
    await bench.idle("decode")


async def test_foreign_models_and_foreign_tokens_are_refused_by_name(bench: Bench) -> None:
    prefill = await bench.worker("prefill")
    foreign = bench.prefill_job(prefill, 8, fingerprint="another")
    bench.send(prefill, foreign)
    assert (await bench.hear(Failed, foreign)).reason == "fingerprint"
    wild = bench.prefill_job(prefill, 8, prompt_token_ids=[10**9] * 8)
    bench.send(prefill, wild)
    assert (await bench.hear(Failed, wild)).reason == "schema"
    long = bench.prefill_job(prefill, 16 * 70)
    bench.send(prefill, long)
    failed = await bench.hear(Failed, long)
    assert (failed.reason, failed.retryable) == ("too_long", False)


async def test_a_gateway_is_told_in_every_roster_what_is_held_for_it(bench: Bench) -> None:
    prefill = await bench.worker("prefill")
    job = bench.prefill_job(prefill, 40)
    bench.send(prefill, job)

    def state() -> str | None:
        rosters = [m for m in bench.heard if isinstance(m, Roster) and m.worker_id == prefill.worker_id]
        items = [item for roster in rosters[-1:] for item in roster.items if item.key == job.key]
        return items[0].state if items else None

    assert await bench.until(state) == "leased"
    await bench.idle("prefill")
    await bench.until(lambda: None if state() else True)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_frozen_worker_comes_back_as_a_new_generation_with_nothing_held(bench: Bench, role: str) -> None:
    prefill = await bench.worker("prefill")
    before = await bench.worker(role)
    job = bench.prefill_job(prefill, 40)
    bench.send(prefill, job)
    await bench.hear(Started, job)
    pid = bench.service.process(role).pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(1.5)  # longer than a registration lives
    os.kill(pid, signal.SIGCONT)

    async def renewed() -> bool:
        now = await bench.registry.worker(before.worker_id)
        return now is not None and now.generation != before.generation

    end_s = time.monotonic() + 10
    while not await renewed():
        assert time.monotonic() < end_s, "no new generation"
        await asyncio.sleep(0.05)
    await bench.idle(role)
    prefill, decode = await bench.worker("prefill"), await bench.worker("decode")
    job = bench.prefill_job(prefill, 40)
    bench.send(prefill, job)
    await bench.hear(Started, job)
    bench.send(decode, bench.decode_job(job, prefill))
    assert (await bench.hear(Finished, job)).num_output_tokens == 6
    await bench.idle(role)


async def test_a_draining_prefill_worker_takes_nothing_new_and_stays_until_its_blocks_are_released(
    bench: Bench,
) -> None:
    prefill = await bench.worker("prefill")
    job = bench.prefill_job(prefill, 40)
    bench.send(prefill, job)
    await bench.hear(Started, job)
    bench.send(prefill, want(job, prefill))
    await bench.hear(KvReady, job, lambda message: message.is_last)
    process = bench.service.process("prefill")
    assert process.process is not None
    process.process.send_signal(signal.SIGTERM)
    late = bench.prefill_job(prefill, 8)

    async def is_draining() -> bool:
        now = await bench.registry.worker(prefill.worker_id)
        return now is not None and now.state == "draining"

    end_s = time.monotonic() + 5
    while not await is_draining():
        assert time.monotonic() < end_s
        await asyncio.sleep(0.02)
    bench.send(prefill, late)
    assert (await bench.hear(Failed, late)).reason == "draining"
    assert process.process.poll() is None
    bench.send(prefill, KvRelease(**job.key._asdict(), worker_id="spy", generation="s1"))
    assert await asyncio.to_thread(process.process.wait, 10) == 0
    assert await bench.registry.worker(prefill.worker_id) is None
