"""The kernels that the CUDA executor calls, as one set: Triton's, or their eager twins for tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class KernelSet:
    """Functions with the signatures of the launchers in pdserve/kernels."""

    name: str
    rms_norm: Callable[..., tuple[Tensor, Tensor]]
    swiglu: Callable[[Tensor], Tensor]
    write_kv: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    rope_and_write_kv: Callable[..., Tensor]
    paged_decode_attention: Callable[..., Tensor]
    paged_prefill_attention: Callable[..., Tensor]


def triton_kernels() -> KernelSet:
    """Triton's kernels: compiled for the GPU when first called, interpreted under TRITON_INTERPRET."""
    from pdserve.kernels.paged_decode_attention import paged_decode_attention  # noqa: PLC0415  needs Triton
    from pdserve.kernels.paged_prefill_attention import paged_prefill_attention  # noqa: PLC0415
    from pdserve.kernels.rms_norm import rms_norm  # noqa: PLC0415
    from pdserve.kernels.swiglu import swiglu  # noqa: PLC0415
    from pdserve.kernels.write_kv import rope_and_write_kv, write_kv  # noqa: PLC0415

    return KernelSet(
        "triton", rms_norm, swiglu, write_kv, rope_and_write_kv, paged_decode_attention, paged_prefill_attention
    )


def eager_kernels() -> KernelSet:
    """The eager twins of Triton's kernels, for any device; tests compare with them."""
    from pdserve.kernels.reference import layers as reference_layers  # noqa: PLC0415
    from pdserve.kernels.reference import paged_attention as reference_attention  # noqa: PLC0415

    return KernelSet(
        "eager",
        reference_layers.rms_norm,
        reference_layers.swiglu,
        reference_layers.write_kv,
        reference_layers.rope_and_write_kv,
        reference_attention.paged_decode_attention,
        reference_attention.paged_prefill_attention,
    )
