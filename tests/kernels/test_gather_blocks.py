from __future__ import annotations

import pytest
import torch

from pdserve.kernels.reference import blocks as reference_blocks


@pytest.mark.parametrize("num_words", [1, 1021, 4096, 9001])
@pytest.mark.parametrize("chosen", [[], [3], [6, 0, 2, 6]], ids=["none", "one", "repeated"])
def test_gathered_blocks_are_those_of_the_twin(interpreted, num_words, chosen):
    cache = torch.randn(7, num_words)
    ids = torch.tensor(chosen, dtype=torch.int64)
    assert torch.equal(interpreted(cache, ids), reference_blocks.gather_blocks(cache, ids))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_scattering_what_was_gathered_moves_blocks_bit_for_bit(interpreted, dtype):
    cache = torch.randn(9, 3, 2, 4, 2, 10).to(dtype)
    target = torch.zeros_like(cache)
    packed = interpreted(cache, torch.tensor([8, 1, 5]))
    interpreted(packed, target, torch.tensor([0, 7, 3]), function="scatter_blocks")
    expected = torch.zeros_like(cache)
    reference_blocks.scatter_blocks(packed, expected, torch.tensor([0, 7, 3]))
    assert torch.equal(target, expected)
    assert torch.equal(target[[0, 7, 3]], cache[[8, 1, 5]])
