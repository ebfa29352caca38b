"""A worker's transports over real TCP: blocks are compared with their digests, or not where INTEGRITY is off."""

from __future__ import annotations

import asyncio

import pytest
import torch

from pdserve.reasons import TransferReason
from pdserve.registration import WorkerRef
from pdserve.transfer.choose import usable_transports
from pdserve.transfer.descriptor import decode_descriptor
from pdserve.transfer.digest import block_digests
from pdserve.transfer.pulls.pull import PullOutcome
from pdserve.worker.transports import TransportOptions, WorkerTransports


def transports_of(kv_cache: torch.Tensor, *, verifies: bool) -> WorkerTransports:
    options = TransportOptions(
        setting="tcp",
        kv_signature="signature",
        quarantine_s=20.0,
        read_timeout_s=10.0,
        make=lambda: usable_transports("tcp", host="127.0.0.1", port=0, advertise_host="", progress_thread=False),
        verifies=verifies,
    )
    return WorkerTransports(kv_cache, options)


@pytest.mark.parametrize("verifies", [True, False])
async def test_announced_digests_are_compared_only_with_integrity(verifies: bool) -> None:
    theirs, ours = torch.arange(64.0).reshape(4, 16), torch.zeros(4, 16)
    lender, reader = transports_of(theirs, verifies=True), transports_of(ours, verifies=verifies)
    lender.open(WorkerRef("p", "1"))
    reader.open(WorkerRef("d", "1"))
    ended: asyncio.Future[PullOutcome] = asyncio.get_running_loop().create_future()
    digests = block_digests(theirs, [1, 2])
    lender.expect("nonce", [1, 2])
    try:
        (payload,) = lender.announced()
        blocks = ([1, 2], [3, 0], digests[::-1])  # those of the other block: something is damaged
        reader.pull(decode_descriptor(payload), "nonce", blocks, on_end=ended.set_result, on_terminal=lambda _: None)
        outcome = await asyncio.wait_for(ended, 10)
    finally:
        await reader.close()
        await lender.close()
    assert (outcome.ok, outcome.reason) == ((False, TransferReason.VERIFY) if verifies else (True, None))
    assert torch.equal(ours[[3, 0]], theirs[[1, 2]])
