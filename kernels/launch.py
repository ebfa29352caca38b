"""What the launchers of all Triton kernels share: whether Triton interprets, and what a kernel may be given.

Arguments that change from step to step are not specialised (`do_not_specialize`): a kernel that was compiled during the
warm-up is never compiled again while it serves.

`TRITON_INTERPRET=1`, set before this module is imported, makes every kernel run on the CPU, slowly: for tests.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from pdserve.errors import SettingError

IS_INTERPRETED: bool = triton.knobs.runtime.interpret
"""Decided when the kernels are imported, and the same for all of them."""

LOG2_E = 1.4426950408889634
"""Kernels compute powers of two."""

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def check_float(**tensors: Tensor) -> None:
    """Every tensor has a type that the kernels compute with, and its last dimension lies in one piece.

    Raises:
        SettingError: bfloat16 in the interpreter.
    """
    for name, tensor in tensors.items():
        assert tensor.dtype in _FLOATS, f"{name} is {tensor.dtype}"
        assert tensor.stride(-1) == 1, f"{name} has strides {tensor.stride()}"
        if IS_INTERPRETED and tensor.dtype is torch.bfloat16:
            raise SettingError(
                "DTYPE",
                "bfloat16",
                "float32 or float16 under TRITON_INTERPRET, because the interpreter computes bfloat16 wrongly",
            )


def capability(device: torch.device) -> int:
    """Compute capability of the device, 90 for 9.0; without a GPU, that of the oldest one that is served."""
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << max(0, number - 1).bit_length()


def cdiv(number: int, divisor: int) -> int:
    """Division that rounds up."""
    return -(-number // divisor)


def dot_precision(dtype: torch.dtype) -> str:
    """The input precision that `tl.dot` is given: real float32 instead of TF32; other types have no choice."""
    return "ieee" if dtype is torch.float32 else "tf32"
