from __future__ import annotations

import pytest
import torch

from pdserve.engine.sampling.draw import draw, kernel_arguments
from pdserve.kernels.reference.sampling import sample_top_k_top_p

FILTERS = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "plain": (1.0, 0, 1.0, 0.0),
    "hot": (3.0, 0, 1.0, 0.0),
    "top-k": (0.7, 5, 1.0, 0.0),
    "top-k-1": (0.7, 1, 1.0, 0.0),
    "top-k-above-the-vocabulary": (1.0, 10**6, 1.0, 0.0),
    "top-p": (1.0, 0, 0.6, 0.0),
    "top-p-0": (1.0, 0, 0.0, 0.0),
    "min-p": (1.0, 0, 1.0, 0.05),
    "all": (1.3, 40, 0.9, 0.01),
}


def _rows(filters, num_rows, vocab_size):
    torch.manual_seed(vocab_size)
    temperature, top_k, top_p, min_p = filters
    return (
        3 * torch.randn(num_rows, vocab_size),
        torch.full((num_rows,), temperature),
        torch.full((num_rows,), top_k, dtype=torch.int32),
        torch.full((num_rows,), top_p),
        torch.full((num_rows,), min_p),
        torch.rand(num_rows, dtype=torch.float64),
    )


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
def test_tokens_are_those_of_the_twin(interpreted, filters):
    rows = _rows(filters, 3, 97)
    assert interpreted(*rows).tolist() == sample_top_k_top_p(*rows).tolist()


@pytest.mark.parametrize(("vocab_size", "name"), [(1, "all"), (2501, "plain"), (2501, "all")])
def test_the_smallest_vocabulary_and_one_of_several_tiles(interpreted, vocab_size, name):
    rows = _rows(FILTERS[name], 2, vocab_size)
    assert interpreted(*rows).tolist() == sample_top_k_top_p(*rows).tolist()


@pytest.mark.parametrize("filters", [f for name, f in FILTERS.items() if name != "greedy"], ids=str)
def test_the_twin_draws_what_the_engine_draws(filters):
    logits, temperatures, top_k, top_p, min_p, numbers = _rows(filters, 50, 1000)
    scaled = logits / temperatures[:, None]
    scaled -= scaled.amax(1, keepdim=True)
    expected = draw(scaled, numbers, top_k=top_k.tolist(), top_p=top_p.tolist(), min_p=min_p.tolist())
    assert sample_top_k_top_p(logits, temperatures, top_k, top_p, min_p, numbers).tolist() == expected.tolist()


def test_the_engine_hands_the_kernel_what_it_draws_by_itself():
    torch.manual_seed(2)
    logits, temperatures = 3 * torch.randn(4, 300), torch.tensor([1.0, 0.3, 2.0, 1e-38])
    numbers = torch.rand(4, dtype=torch.float64)
    filters = {"top_k": [-1, 7, 2**40, 0], "top_p": [1.0, 0.9, 0.5, 1.0], "min_p": [0.0, 0.0, 0.01, 0.0]}
    arguments = kernel_arguments(logits, temperatures, numbers, **filters)
    scaled = (logits - logits.amax(1, keepdim=True)) / temperatures[:, None]
    assert sample_top_k_top_p(*arguments).tolist() == draw(scaled, numbers, **filters).tolist()


def test_equal_logits_are_kept_together_and_the_greedy_tie_goes_to_the_lowest_id(interpreted):
    logits = torch.zeros(3, 10)
    logits[:, [7, 4, 9]] = 2.0
    greedy_then_top_1 = (
        torch.tensor([0.0, 1.0, 1.0]),
        torch.tensor([0, 1, 1], dtype=torch.int32),
        torch.ones(3),
        torch.zeros(3),
        torch.tensor([0.99, 0.1, 0.99], dtype=torch.float64),
    )
    assert interpreted(logits, *greedy_then_top_1).tolist() == [4, 4, 9]


@pytest.mark.parametrize("number", [0.0, 1 - 2.0**-53])
def test_the_ends_of_the_unit_interval_give_tokens_of_positive_probability(interpreted, number):
    logits = torch.full((1, 50), float("-inf"))
    logits[0, [11, 30]] = torch.tensor([0.0, -1.0])
    rows = _rows(FILTERS["plain"], 1, 50)
    expected = 11 if number == 0 else 30
    assert interpreted(logits, *rows[1:5], torch.tensor([number], dtype=torch.float64)).tolist() == [expected]


def test_no_rows_give_no_tokens(interpreted):
    assert interpreted(*_rows(FILTERS["all"], 0, 10)).shape == (0,)
