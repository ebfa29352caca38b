"""The digest of a KV block: 128 bits, the same on CPU and on GPU, as fast as memory allows.

A block is a row of 64-bit words x[i] (its last word filled up with zeros). Its weights w[i] and v[i] are products of
two fixed pseudo-random odd numbers, one for the word's place in a run of 512 words and one for the run, so that those
of a whole block need little memory. Everything is modulo 2**64:

    y[i] = x[i] ^ (x[i] >> 32)        arithmetic shift
    digest = sum(w[i] * x[i]), sum(v[i] * y[i])        little-endian, 8 bytes each

A change of one word always shows: an odd weight times a difference other than zero is not zero. For any other
change at least one of the sums sees a difference in the low half of some word, and misses it with a chance of
2**-26 at most (typical changes: 2**-128). That is what the shift is for: without it two flipped sign bits would
cancel each other out. It finds stale, foreign and damaged blocks; it is no defence against forgery.

On a CPU this uses the calling thread alone and releases the GIL: the CPU kernels, at several times the rate of numpy,
which does it where an installation lacks them.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from pdserve.kernels.cpu import ops as cpu_ops
from pdserve.transfer.memory import bytes_view

DIGEST_BYTES = 16
RUN_WORDS = 512
_CHUNK_WORDS = 32768  # its scratch (256 KiB) stays in a core's cache
_DEVICE_CHUNK_BYTES = 64 << 20
_WEIGHTS_LOCK = threading.Lock()

Words = np.ndarray[Any, np.dtype[np.int64]]


def block_digests(kv_cache: torch.Tensor, block_ids: list[int]) -> list[bytes]:
    """16 bytes per block.

    Args:
        kv_cache: `[num_blocks, …]`, contiguous, any dtype; a block has a multiple of 4 bytes.
        block_ids: which blocks, in the order of the result.
    """
    if not block_ids:
        return []
    blocks = bytes_view(kv_cache)
    assert blocks.shape[1] % 4 == 0, f"a block has {blocks.shape[1]} bytes, not a multiple of 4"
    if blocks.device.type == "cuda":
        sums = sums_on_gpu(blocks, block_ids)
    elif blocks.device.type != "cpu":
        sums = sums_on_device(blocks, block_ids)
    elif _has_kernel(blocks):
        sums = sums_by_kernel(blocks, block_ids)
    else:
        sums = sums_by_numpy(blocks, block_ids)
    raw = sums.astype("<i8", copy=False).tobytes()
    return [raw[start : start + DIGEST_BYTES] for start in range(0, len(raw), DIGEST_BYTES)]


def _has_kernel(blocks: torch.Tensor) -> bool:
    return blocks.device.type == "cpu" and cpu_ops.why_unavailable() is None and sys.byteorder == "little"


def wrong_block_counter(kv_cache: torch.Tensor) -> Callable[[list[int], list[bytes]], int]:
    """How many of these blocks differ from these digests, for one tensor: little is left to do at each call.

    Raises (what is returned):
        IndexError: there is no such block.
        Exception: whatever a device says.
    """
    blocks = bytes_view(kv_cache)
    if _has_kernel(blocks):
        return partial(_count_wrong_by_kernel, cpu_ops.load_library().pds_num_wrong_blocks, blocks)
    return partial(_count_wrong, blocks)


def _count_wrong_by_kernel(
    count: Callable[..., int], blocks: torch.Tensor, block_ids: list[int], announced: list[bytes]
) -> int:
    _check_whole(block_ids, announced)
    num_blocks, block_bytes = blocks.shape
    ids = array("q", block_ids)
    where = (blocks.data_ptr(), num_blocks, block_bytes, ids.buffer_info()[0], len(ids))
    num_wrong = count(*where, b"".join(announced), *weight_addresses(block_bytes))
    if num_wrong < 0:
        raise IndexError(f"blocks {block_ids} of a pool of {num_blocks}")
    return num_wrong


def _count_wrong(blocks: torch.Tensor, block_ids: list[int], announced: list[bytes]) -> int:
    _check_whole(block_ids, announced)
    if min(block_ids) < 0 or max(block_ids) >= len(blocks):
        raise IndexError(f"blocks {block_ids} of a pool of {len(blocks)}")
    found = block_digests(blocks, block_ids)
    return sum(a != b for a, b in zip(announced, found, strict=True))


def _check_whole(block_ids: list[int], digests: list[bytes]) -> None:
    assert len(block_ids) == len(digests), (len(block_ids), len(digests))
    assert all(len(digest) == DIGEST_BYTES for digest in digests), digests


def sums_by_kernel(blocks: torch.Tensor, block_ids: list[int]) -> Words:
    """`[len(block_ids), 2]`: both sums of each block, by the CPU kernels."""
    num_blocks, block_bytes = blocks.shape
    # The kernel reads addresses: nothing out of range may reach it.
    assert min(block_ids) >= 0, min(block_ids)
    assert max(block_ids) < num_blocks, (max(block_ids), num_blocks)
    ids, sums = array("q", block_ids), array("q", bytes(DIGEST_BYTES * len(block_ids)))
    where = (blocks.data_ptr(), block_bytes, ids.buffer_info()[0], len(ids))
    cpu_ops.block_sums(*where, weights=weight_addresses(block_bytes), sums=sums.buffer_info()[0])
    return np.frombuffer(sums, dtype=np.int64).reshape(-1, 2)


def sums_by_numpy(blocks: torch.Tensor, block_ids: list[int]) -> Words:
    """The same sums without the CPU kernels."""
    num_words = -(-blocks.shape[1] // 8)
    rows_at_once = max(1, _CHUNK_WORDS // num_words)
    sums = np.empty((len(block_ids), 2), dtype=np.int64)
    for first in range(0, len(block_ids), rows_at_once):
        ids = block_ids[first : first + rows_at_once]
        _add_up(_gather(blocks, ids), sums[first : first + len(ids)])
    return sums


def _gather(blocks: torch.Tensor, block_ids: list[int]) -> Words:
    """`[len(block_ids), num_words]`: a view for one block of whole words, else a copy filled up with zeros."""
    array = blocks.numpy()
    if array.shape[1] % 8:
        padded = np.zeros((len(block_ids), -(-array.shape[1] // 8) * 8), dtype=np.uint8)
        padded[:, : array.shape[1]] = array[block_ids]
        return padded.view(np.int64)
    words: Words = array.view(np.int64)
    return words[block_ids[0]][None] if len(block_ids) == 1 else words[block_ids]


def _add_up(words: Words, sums: Words) -> None:
    """Both sums of each row of words, chunk by chunk."""
    weights_x, weights_y = _weights(words.shape[1])
    sums[:] = 0
    for start in range(0, words.shape[1], _CHUNK_WORDS):
        x = words[:, start : start + _CHUNK_WORDS]
        y = np.right_shift(x, 32)
        np.bitwise_xor(y, x, out=y)
        stop = start + x.shape[1]
        sums[:, 0] += np.einsum("bn,n->b", x, weights_x[start:stop])
        sums[:, 1] += np.einsum("bn,n->b", y, weights_y[start:stop])


def sums_on_gpu(blocks: torch.Tensor, block_ids: list[int]) -> Words:
    """The same sums by the Triton kernel, which reads each block once.

    Args:
        blocks: uint8 `[num_blocks, block_bytes]`.
    """
    from pdserve.kernels.block_digest import block_digest  # noqa: PLC0415 — brings Triton

    sums: Words = block_digest(blocks, torch.tensor(block_ids, device=blocks.device)).cpu().numpy()
    return sums


def sums_on_device(blocks: torch.Tensor, block_ids: list[int]) -> Words:
    """The same sums with torch operations on any device (integer multiplication wraps there too).

    Args:
        blocks: uint8 `[num_blocks, block_bytes]`.
    """
    num_words = -(-blocks.shape[1] // 8)
    weights = torch.from_numpy(np.stack(_weights(num_words))).to(blocks.device)
    ids = torch.tensor(block_ids, device=blocks.device)
    parts = []
    rows_at_once = max(1, _DEVICE_CHUNK_BYTES // (num_words * 8))
    for first in range(0, len(block_ids), rows_at_once):
        chosen = blocks[ids[first : first + rows_at_once]]
        x = torch.nn.functional.pad(chosen, (0, num_words * 8 - chosen.shape[1])).view(torch.int64)
        y = x ^ (x >> 32)
        parts.append(torch.stack([(x * weights[0]).sum(1), (y * weights[1]).sum(1)], dim=1))
    sums: Words = torch.cat(parts).cpu().numpy()
    return sums


@cache
def _weights(num_words: int) -> tuple[Words, Words]:
    """Both rows of weights, odd int64 `[num_words]`."""
    num_runs = -(-num_words // RUN_WORDS)
    x, y = ((row[RUN_WORDS:, None] * row[None, :RUN_WORDS]).reshape(-1)[:num_words] for row in _weight_parts(num_runs))
    return x, y


@cache
def weight_addresses(block_bytes: int) -> tuple[int, int]:
    """Where both rows' parts for blocks of this size lie, for good; asking an array each time takes longer."""
    x, y = _weight_parts(-(-block_bytes // (8 * RUN_WORDS)))
    return x.ctypes.data, y.ctypes.data


def _weight_parts(num_runs: int) -> tuple[Words, Words]:
    """Parts of both rows, odd int64 `[RUN_WORDS + num_runs]`: places in a run, then runs. Always the same arrays."""
    with _WEIGHTS_LOCK:  # two threads that ask first would each make some, and one's addresses would dangle
        return _make_weight_parts(num_runs)


@cache
def _make_weight_parts(num_runs: int) -> tuple[Words, Words]:
    """Both rows by SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014)."""
    position = np.arange(RUN_WORDS + num_runs, dtype=np.uint64)
    return _split_mix(position, seed=0x70647365727665), _split_mix(position, seed=0x6B76626C6F636B)


def _split_mix(position: np.ndarray[Any, np.dtype[np.uint64]], seed: int) -> Words:
    z = (position + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return z.view(np.int64)
