from __future__ import annotations

import pytest

from pdserve.engine.executors.cuda.graphs import GraphSize, find_size, plan_sizes
from pdserve.engine.executors.cuda.memory import ModelSize, reserved_bytes

LLAMA_8B = ModelSize(4096, 14336, 32, 128, 128256, 2)


def nothing(num_seqs: int, max_context: int) -> int:
    return 0


def test_sizes_cover_every_step_up_to_the_largest():
    sizes = plan_sizes(20, 5000, nothing, 0)
    assert {size.num_seqs for size in sizes} == {1, 2, 4, 8, 16, 20}
    assert {size.max_context for size in sizes} == {1024, 4096, 5000}
    for num_seqs in range(1, 21):
        for context in (1, 1024, 1025, 5000):
            assert find_size(sizes, num_seqs, context) is not None
    assert find_size(sizes, 21, 1) is None


def test_the_largest_is_captured_first_so_that_the_others_fit_into_its_memory():
    sizes = plan_sizes(64, 8192, nothing, 0)
    assert sizes[0] == GraphSize(64, 8192)
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("num_seqs", "context", "expected"),
    [(1, 1, (1, 1024)), (3, 1024, (4, 1024)), (9, 1025, (16, 4096)), (17, 4097, (20, 5000))],
)
def test_a_step_takes_the_smallest_size_that_holds_it(num_seqs, context, expected):
    assert find_size(plan_sizes(20, 5000, nothing, 0), num_seqs, context) == GraphSize(*expected)


def test_a_worker_that_does_not_decode_captures_nothing():
    assert plan_sizes(0, 8192, nothing, 0) == []


def test_sizes_whose_workspace_is_too_large_are_left_out():
    sizes = plan_sizes(64, 100_000, lambda num_seqs, context: num_seqs * context, 64 * 4096)
    assert GraphSize(64, 4096) in sizes
    assert GraphSize(64, 16384) not in sizes
    assert GraphSize(1, 100_000) in sizes


def test_a_short_context_has_one_size_of_its_own_length():
    assert {size.max_context for size in plan_sizes(4, 300, nothing, 0)} == {300}


def test_reserved_memory_grows_with_what_steps_and_graphs_take():
    def reserved(seqs: int, tokens: int, length: int = 8192) -> int:
        return reserved_bytes(LLAMA_8B, max_decode_seqs=seqs, max_batched_tokens=tokens, max_model_len=length)

    assert reserved(64, 512) > reserved(0, 512)
    assert reserved(64, 8192) > reserved(64, 512)
    assert reserved(64, 512, 131072) > reserved(64, 512)
    one_prompt = 8192 * 3 * 14336 * 2
    assert one_prompt < reserved(64, 8192) < 10 * one_prompt, "not the order of magnitude of a step"
