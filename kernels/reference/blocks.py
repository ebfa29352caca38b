"""Eager torch twins of the kernels on whole KV blocks: same names, same signatures."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

Words = np.ndarray[Any, np.dtype[Any]]

_SEEDS = (0x70647365727665, 0x6B76626C6F636B)


def gather_blocks(kv_cache: Tensor, block_ids: Tensor) -> Tensor:
    """The bytes of some blocks, end to end: uint8 `[num_chosen, block_bytes]`."""
    return kv_cache.reshape(kv_cache.shape[0], -1).view(torch.uint8)[block_ids]


def scatter_blocks(packed: Tensor, kv_cache: Tensor, block_ids: Tensor) -> None:
    """The way back: uint8 `[num_chosen, block_bytes]` into the blocks `block_ids`."""
    kv_cache.view(kv_cache.shape[0], -1).view(torch.uint8)[block_ids] = packed


def block_digest(kv_cache: Tensor, block_ids: Tensor) -> Tensor:
    """Both 64-bit sums of each block, int64 `[num_chosen, 2]`, as transfer/digest.py defines them."""
    rows = gather_blocks(kv_cache, block_ids)
    num_words = -(-rows.shape[1] // 8)
    x = torch.nn.functional.pad(rows, (0, 8 * num_words - rows.shape[1])).view(torch.int64)
    y = x ^ (x >> 32)
    weights = (torch.from_numpy(_weights(num_words, seed)).to(rows.device) for seed in _SEEDS)
    return torch.stack([(words * weight).sum(1) for words, weight in zip((x, y), weights, strict=True)], dim=1)


def _weights(num_words: int, seed: int) -> Words:
    """Each word's weight: that of its place in a run of 512 words, times that of the run."""
    word = np.arange(num_words, dtype=np.uint64)
    return (_split_mix(word % 512, seed) * _split_mix(512 + word // 512, seed)).view(np.int64)


def _split_mix(position: Words, seed: int) -> Words:
    """SplitMix64 of positions, made odd."""
    z = (position + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)
