"""How the CPU kernels want weights packed on this processor: element type, sizes, and a name for the layout.

A packed file is mapped only by processes with the same layout: the name tells apart everything that decides it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pdserve.engine.executors.cpu.shape import CpuShape
from pdserve.kernels.cpu import ops as cpu_ops

_TYPES = {torch.float32: cpu_ops.F32, torch.bfloat16: cpu_ops.BF16, torch.int8: cpu_ops.I8}
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """Packed weights of one type on one instruction set."""

    dtype: torch.dtype
    """float32, bfloat16 or int8."""
    packed_type: int
    """The kernels' own number for it: cpu_ops.F32, BF16, I8, BF16_PAIRS or I8_PAIRS."""

    @classmethod
    def of(cls, dtype: torch.dtype, context: cpu_ops.CpuContext) -> WeightLayout:
        """The layout that this context's steps read."""
        return cls(dtype, context.packed_type(_TYPES[dtype]))

    @property
    def key(self) -> tuple[object, ...]:
        """Everything that the bytes of the same packed weights depend on; its first part is for people."""
        return (self.dtype, self.packed_type, cpu_ops.PANEL, cpu_ops.GATE_GROUP)

    @property
    def has_scales(self) -> bool:
        """Whether each output row has a scale."""
        return self.dtype == torch.int8

    def matrix_bytes(self, num_columns: int, k: int) -> int:
        """Aligned bytes that a matrix of whole panels takes."""
        k = round_up(k, 2) if self.packed_type in (cpu_ops.BF16_PAIRS, cpu_ops.I8_PAIRS) else k
        return round_up(padded_columns(num_columns) * k * self.dtype.itemsize, _ALIGNMENT)

    def scale_bytes(self, num_columns: int) -> int:
        """Aligned bytes that all scales of a matrix take; 0 without scales."""
        return round_up(padded_columns(num_columns) * 4, _ALIGNMENT) if self.has_scales else 0

    def packed_bytes(self, shape: CpuShape) -> int:
        """Memory of all packed matrices of a model, and of their scales."""
        return sum(self.matrix_bytes(columns, k) + self.scale_bytes(columns) for columns, k in _matrices(shape))


def padded_columns(num_columns: int) -> int:
    """Columns that a matrix takes in whole panels."""
    return round_up(num_columns, cpu_ops.PANEL)


def padded_intermediate(shape: CpuShape) -> int:
    """Inner size of the MLP in whole groups of gate."""
    return round_up(shape.intermediate_size, cpu_ops.GATE_GROUP)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not below `value`."""
    return -(-value // multiple) * multiple


def _matrices(shape: CpuShape) -> Iterator[tuple[int, int]]:
    """Columns and k of each packed matrix."""
    heads, inner = shape.num_heads * shape.head_dim, padded_intermediate(shape)
    for _ in range(shape.num_layers):
        yield shape.num_qkv_rows, shape.hidden_size
        yield shape.hidden_size, heads
        yield 2 * inner, shape.hidden_size
        yield shape.hidden_size, inner
    yield shape.vocab_size, shape.hidden_size
