"""The kernel, its twin and transfer/digest.py, which defines the function, agree bit for bit."""

from __future__ import annotations

import pytest
import torch

from pdserve.kernels.reference import blocks as reference_blocks
from pdserve.transfer.digest import block_digests


def as_bytes(sums: torch.Tensor) -> list[bytes]:
    return [row.numpy().astype("<i8").tobytes() for row in sums]


@pytest.mark.parametrize("num_floats", [1, 2, 63, 1021, 4096, 9002])
@pytest.mark.parametrize("chosen", [[], [3], [*range(11), 0, 5]], ids=["none", "one", "13-blocks"])
def test_kernel_and_twin_are_the_digest_of_the_transfer(interpreted, num_floats, chosen):
    torch.manual_seed(num_floats)
    cache = torch.randint(-(2**31), 2**31, (11, num_floats), dtype=torch.int32)
    ids = torch.tensor(chosen, dtype=torch.int64)
    expected = block_digests(cache, chosen)
    assert as_bytes(reference_blocks.block_digest(cache, ids)) == expected
    assert as_bytes(interpreted(cache, ids)) == expected


@pytest.mark.parametrize("fill", [0, -1, 2**31 - 1, -(2**31)])
def test_extreme_words(interpreted, fill):
    cache = torch.full((2, 130), fill, dtype=torch.int32)
    assert as_bytes(interpreted(cache, torch.tensor([1, 0]))) == block_digests(cache, [1, 0])
