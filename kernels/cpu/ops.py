"""The CPU kernels as Python sees them: finds the compiled library and mirrors its C ABI (kernels/cpu/api.h).

Plain ctypes on raw addresses: no torch here, and every call releases the GIL. The library is optional; an
installation without a compiler lacks it, and `why_unavailable` says so.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

F32, BF16, I8, F16, BF16_PAIRS, I8_PAIRS = 0, 1, 2, 3, 4, 5
PANEL = 32
"""Columns of a panel of packed weights."""
GATE_GROUP = 16
"""Columns of gate, then of up, inside one panel."""

_address = ctypes.c_void_p
_i32 = ctypes.c_int32
_i64 = ctypes.c_int64


class Matrix(ctypes.Structure):
    """PdsMatrix: panels `[ceil(n / 32)][k][32]`, or in pairs of k (kernels/cpu/api.h); scale and bias `[n]`."""

    _fields_ = (("panels", _address), ("scale", _address), ("bias", _address), ("k", _i32), ("n", _i32))


class Layer(ctypes.Structure):
    """PdsLayer: the matrices and norms of one layer, and its sliding window in tokens."""

    _fields_ = (
        *((name, Matrix) for name in ("qkv", "o", "gate_up", "down")),
        *((name, _address) for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm")),
        ("window", _i64),
    )


class Model(ctypes.Structure):
    """PdsModel: sizes, types and layers of a model, constant from its load on."""

    _fields_ = (
        *((name, _i32) for name in ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "block_size")),
        *((name, _i32) for name in ("weight_type", "kv_type", "embed_type")),
        ("norm_eps", ctypes.c_float),
        ("softmax_scale", ctypes.c_float),
        ("embed", _address),
        ("final_norm", _address),
        ("head", Matrix),
        ("rope_cos", _address),
        ("rope_sin", _address),
        ("layers", ctypes.POINTER(Layer)),
    )


class Batch(ctypes.Structure):
    """PdsBatch; slices are rows of `(first_row, num_rows, start, table offset)`, int32."""

    _fields_ = (
        *((name, _i32) for name in ("num_rows", "num_slices", "num_logit_rows")),
        *((name, _address) for name in ("token_ids", "slices", "block_tables", "logit_rows", "kv_cache", "logits")),
    )


def why_unavailable() -> str | None:
    """Why the kernels cannot be used here, or None when they can."""
    if os.environ.get("PDS_CPU_KERNELS") == "off":
        return "PDS_CPU_KERNELS=off"
    if _library_path() is None:
        return "this installation was built without a C++ compiler, so it lacks the CPU kernels"
    try:
        load_library()
    except (OSError, AttributeError) as error:
        return f"the compiled CPU kernels are not of this version ({error}); `make setup` builds them anew"
    return None


@functools.cache
def load_library() -> ctypes.CDLL:
    """The compiled library with its signatures set.

    Raises:
        OSError: it cannot be loaded.
        AttributeError: it was built from another version and lacks a function.
    """
    path = _library_path()
    assert path is not None, "ask why_unavailable first"
    library = ctypes.CDLL(str(path))
    library.pds_best_isa.restype = ctypes.c_char_p
    library.pds_create.argtypes, library.pds_create.restype = (_i32, ctypes.c_char_p), _address
    library.pds_destroy.argtypes, library.pds_destroy.restype = (_address,), None
    library.pds_isa.argtypes, library.pds_isa.restype = (_address,), ctypes.c_char_p
    library.pds_packed_type.argtypes, library.pds_packed_type.restype = (_address, _i32), _i32
    library.pds_step.argtypes = (_address, ctypes.POINTER(Model), ctypes.POINTER(Batch))
    library.pds_step.restype = _i32
    library.pds_pack.argtypes = (
        *(_address, _i32, _i64, _i64, _i64),
        *(_address, _i32, _address, _i64, _i64, _i64, _i32),
    )
    library.pds_pack.restype = None
    library.pds_block_sums.argtypes = (_address, _i64, _address, _i64, _address, _address, _address)
    library.pds_block_sums.restype = None
    library.pds_num_wrong_blocks.argtypes = (
        *(_address, _i64, _i64, _address, _i64),
        *(ctypes.c_char_p, _address, _address),
    )
    library.pds_num_wrong_blocks.restype = _i64
    library.pds_read_gb_per_s.argtypes = (_address, _address, _i64)
    library.pds_read_gb_per_s.restype = ctypes.c_double
    library.pds_fma_gflops.argtypes, library.pds_fma_gflops.restype = (_address, _i32, _i64), ctypes.c_double
    return library


class CpuContext:
    """A team of threads with its working memory, on one instruction set (avx512_bf16 | avx512 | avx2 | portable).

    Called from one thread at a time.

    Args:
        num_threads: the caller included.
        isa: empty takes the best one of this machine.

    Raises:
        RuntimeError: this machine lacks that instruction set, or threads cannot be started.
    """

    def __init__(self, num_threads: int, isa: str = "") -> None:
        assert num_threads >= 1, num_threads
        self._library = load_library()
        self._handle: int | None = self._library.pds_create(num_threads, isa.encode())
        if not self._handle:
            raise RuntimeError(f"CPU kernels cannot run with {num_threads} threads on {isa or 'any instruction set'}")
        self.num_threads = num_threads
        self.isa: str = self._library.pds_isa(self._handle).decode()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.pds_destroy(self._handle)
            self._handle = None

    def step(self, model: Model, batch: Batch) -> None:
        """Compute one forward step of a batch: its KV and its logits.

        Raises:
            MemoryError: the working memory for this batch cannot be had; nothing was computed.
        """
        if self._library.pds_step(self._handle, ctypes.byref(model), ctypes.byref(batch)):
            raise MemoryError(f"no memory for the intermediate results of {batch.num_rows} rows")

    def packed_type(self, weight_type: int) -> int:
        """The type in which `step` wants weights of this type packed: BF16 and I8, or pairs of them."""
        return int(self._library.pds_packed_type(self._handle, weight_type))

    def read_gb_per_s(self, address: int, num_floats: int) -> float:
        """Rate at which all threads together read memory once."""
        return float(self._library.pds_read_gb_per_s(self._handle, address, num_floats))

    def fma_gflops(self, iterations: int, packed_type: int = F32) -> float:
        """Rate of multiply-adds on registers, as for weights of this type, all threads together."""
        return float(self._library.pds_fma_gflops(self._handle, packed_type, iterations))


def pack(
    source: int,
    source_type: int,
    rows: int,
    k: int,
    *,
    panels: int,
    weight_type: int,
    k_packed: int,
    num_threads: int,
    scale: int = 0,
    group: int | None = None,
    stride: int = 0,
    offset: int = 0,
) -> None:
    """Pack row-major `[rows, k]` into panels: source row r becomes column `r // group * stride + offset + r % group`.

    All addresses; `scale` (`[columns]` fp32) is written for int8 only.
    """
    load_library().pds_pack(
        *(source, source_type, rows, k, k_packed, panels, weight_type, scale or None),
        *(group or rows, stride, offset, num_threads),
    )


def block_sums(
    pool: int, block_bytes: int, block_ids: int, num_ids: int, *, weights: tuple[int, int], sums: int
) -> None:
    """Both sums of each block's digest, on the calling thread; see pds_block_sums in kernels/cpu/api.h.

    All but `block_bytes` and `num_ids` are addresses: block ids int64 `[num_ids]`, sums int64 `[num_ids, 2]`.
    """
    load_library().pds_block_sums(pool, block_bytes, block_ids, num_ids, *weights, sums)


@functools.cache  # asked at every digest: no look into the folder each time
def _library_path() -> Path | None:
    return next(iter(sorted(Path(__file__).parents[1].glob("_cpu_kernels*.so"))), None)
