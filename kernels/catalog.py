"""Every Triton kernel with the shapes for which it is compiled and listed, as calls of its own launcher.

The calls take tensors without memory (torch's meta device), so a catalogue needs no GPU and computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pdserve.kernels.block_digest import block_digest
from pdserve.kernels.gather_blocks import gather_blocks
from pdserve.kernels.paged_decode_attention import paged_decode_attention
from pdserve.kernels.paged_prefill_attention import paged_prefill_attention
from pdserve.kernels.rms_norm import rms_norm
from pdserve.kernels.sample_top_k_top_p import sample_top_k_top_p
from pdserve.kernels.swiglu import swiglu
from pdserve.kernels.write_kv import rope_and_write_kv, write_kv

HEAD_DIMS = (64, 128, 256)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_NUM_LAYERS, _NUM_HEADS, _NUM_KV_HEADS, _BLOCK_SIZE = 32, 32, 8, 16
_NUM_SEQS, _CONTEXT, _HIDDEN = 16, 4096, 4096


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One call of one launcher, and what its machine code must look like."""

    module: str
    """Name of the kernel's module."""
    variant: str
    """What is special about the call: type, head dimension, options."""
    call: Callable[[], object]
    interpreter: str
    """What tests prove under Triton's interpreter."""
    max_registers: int = 128
    has_tensor_cores: bool = False
    has_async_copies: bool = False

    @property
    def name(self) -> str:
        """The case's name in tables and options: unique, and without spaces."""
        return f"{self.module}/{self.variant}"


_NUMERIC = "fp32 ≤ 1e-5, fp16 ≤ 1e-2"
_EXACT = "bit for bit"


def cases() -> list[KernelCase]:
    """All cases of all kernels, in a fixed order."""
    return [*_attention(), *_layers(), *_blocks(), _sampling()]


def _attention() -> list[KernelCase]:
    found = []
    options: list[tuple[str, dict[str, Any]]] = [
        ("", {}),
        ("-softcap-window", {"softcap": 50.0, "sliding_window": 1024}),
    ]
    for module, call in (("paged_decode_attention", _decode), ("paged_prefill_attention", _prefill)):
        for dtype in ("bf16", "fp16"):
            for head_dim in HEAD_DIMS:
                for suffix, extra in options if (dtype, head_dim) == ("bf16", 128) else options[:1]:
                    made = partial(call, DTYPES[dtype], head_dim, **extra)
                    variant = f"{dtype}-d{head_dim}{suffix}"
                    found.append(KernelCase(module, variant, made, _NUMERIC, 255, True, True))
        for head_dim in (64, 128):
            made = partial(call, torch.float32, head_dim)
            found.append(KernelCase(module, f"fp32-d{head_dim}", made, _NUMERIC, 128, False, True))
    return found


def _layers() -> list[KernelCase]:
    found = []
    for dtype in ("bf16", "fp32"):
        rows = _empty(_NUM_SEQS, _HIDDEN, dtype=DTYPES[dtype])
        wide = _empty(_NUM_SEQS, 2 * 14336, dtype=DTYPES[dtype])
        weight = _empty(_HIDDEN, dtype=DTYPES[dtype])
        found += [
            KernelCase("rms_norm", f"{dtype}-{_HIDDEN}", partial(rms_norm, rows, weight, 1e-6), _NUMERIC),
            KernelCase(
                "rms_norm", f"{dtype}-{_HIDDEN}-residual", partial(rms_norm, rows, weight, 1e-6, rows), _NUMERIC
            ),
            KernelCase("swiglu", f"{dtype}-14336", partial(swiglu, wide), _NUMERIC),
            KernelCase("write_kv", f"{dtype}-d128", partial(_write, DTYPES[dtype], 128), _EXACT),
            KernelCase("write_kv", f"{dtype}-d128-rope", partial(_rope, DTYPES[dtype], 128), _NUMERIC),
        ]
    return found


def _blocks() -> list[KernelCase]:
    cache = _kv_cache(torch.bfloat16, 128)
    odd = _empty(64, 1021, dtype=torch.float32)
    ids = _empty(_NUM_SEQS, dtype=torch.int64)
    return [
        KernelCase("gather_blocks", "2-MiB-blocks", partial(gather_blocks, cache, ids), _EXACT),
        KernelCase("block_digest", "2-MiB-blocks", partial(block_digest, cache, ids), _EXACT),
        KernelCase("block_digest", "half-words", partial(block_digest, odd, ids), _EXACT),
    ]


def _sampling() -> KernelCase:
    floats = [_empty(_NUM_SEQS, dtype=torch.float32) for _ in range(3)]
    ints, doubles = _empty(_NUM_SEQS, dtype=torch.int32), _empty(_NUM_SEQS, dtype=torch.float64)
    logits = _empty(_NUM_SEQS, 128256, dtype=torch.float32)
    call = partial(sample_top_k_top_p, logits, floats[0], ints, floats[1], floats[2], doubles)
    return KernelCase("sample_top_k_top_p", "vocab-128256", call, "equal tokens", 128)


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _kv_cache(dtype: torch.dtype, head_dim: int) -> Tensor:
    return _empty(1024, _NUM_LAYERS, 2, _BLOCK_SIZE, _NUM_KV_HEADS, head_dim, dtype=dtype)


def _tables() -> tuple[Tensor, Tensor]:
    return (
        _empty(_NUM_SEQS, _CONTEXT // _BLOCK_SIZE, dtype=torch.int32),
        _empty(_NUM_SEQS, dtype=torch.int32),
    )


def _decode(
    dtype: torch.dtype, head_dim: int, *, softcap: float | None = None, sliding_window: int | None = None
) -> object:
    query = _empty(_NUM_SEQS, _NUM_HEADS, head_dim, dtype=dtype)
    tables, lens = _tables()
    return paged_decode_attention(
        query,
        _kv_cache(dtype, head_dim)[:, 1],
        tables,
        lens,
        max_context_len=_CONTEXT,
        scaling=0.1,
        sliding_window=sliding_window,
        softcap=softcap,
    )


def _prefill(
    dtype: torch.dtype, head_dim: int, *, softcap: float | None = None, sliding_window: int | None = None
) -> object:
    query = _empty(512, _NUM_HEADS, head_dim, dtype=dtype)
    tables, lens = _tables()
    return paged_prefill_attention(
        query,
        _kv_cache(dtype, head_dim)[:, 1],
        _empty(_NUM_SEQS + 1, dtype=torch.int32),
        lens,
        tables,
        max_query_len=256,
        scaling=0.1,
        sliding_window=sliding_window,
        softcap=softcap,
    )


def _states(dtype: torch.dtype, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as views of one merged projection, as the executor has them."""
    merged = _empty(_NUM_SEQS, _NUM_HEADS + 2 * _NUM_KV_HEADS, head_dim, dtype=dtype)
    query, key, value = torch.split(merged, [_NUM_HEADS, _NUM_KV_HEADS, _NUM_KV_HEADS], dim=1)
    return query, key, value


def _write(dtype: torch.dtype, head_dim: int) -> None:
    _, key, value = _states(dtype, head_dim)
    write_kv(key, value, _kv_cache(dtype, head_dim)[:, 1], _empty(_NUM_SEQS, dtype=torch.int64))


def _rope(dtype: torch.dtype, head_dim: int) -> object:
    angles = _empty(_NUM_SEQS, head_dim, dtype=dtype)
    layer, slots = _kv_cache(dtype, head_dim)[:, 1], _empty(_NUM_SEQS, dtype=torch.int64)
    return rope_and_write_kv(*_states(dtype, head_dim), angles, angles, layer, slots)
