"""The KV cache as rows of bytes: what digests and transports see of it. Never interprets them."""

from __future__ import annotations

from collections.abc import Callable

import torch


def bytes_view(kv_cache: torch.Tensor) -> torch.Tensor:
    """uint8 `[num_blocks, block_bytes]` over the same memory.

    Args:
        kv_cache: `[num_blocks, …]`, contiguous.
    """
    assert kv_cache.is_contiguous(), f"the KV cache of shape {tuple(kv_cache.shape)} is not contiguous"
    return kv_cache.detach().reshape(kv_cache.shape[0], -1).view(torch.uint8)


class BlockMemory:
    """Blocks as host memory that sockets can send from and receive into."""

    def __init__(self, kv_cache: torch.Tensor) -> None:
        self._blocks = bytes_view(kv_cache)
        self.num_blocks, self.block_bytes = self._blocks.shape
        self._host = _host_view(self._blocks) if self._blocks.device.type == "cpu" else None

    def load(self, block_id: int) -> memoryview:
        """The bytes of a block: the KV cache itself on a CPU, a copy from a device."""
        if self._host is not None:
            return self._slice(self._host, block_id)
        return _host_view(self._blocks[block_id].cpu())

    def receive(self, block_id: int, fill: Callable[[memoryview], None]) -> None:
        """Let `fill` write a block. From a device's memory an exception in `fill` keeps the block as it was."""
        if self._host is not None:
            fill(self._slice(self._host, block_id))
            return
        staged = torch.empty(self.block_bytes, dtype=torch.uint8)
        fill(_host_view(staged))
        self._blocks[block_id].copy_(staged)

    def _slice(self, host: memoryview, block_id: int) -> memoryview:
        assert 0 <= block_id < self.num_blocks, f"block {block_id} of {self.num_blocks}"
        return host[block_id * self.block_bytes : (block_id + 1) * self.block_bytes]


def _host_view(tensor: torch.Tensor) -> memoryview:
    view: memoryview = tensor.numpy().reshape(-1).data
    return view
