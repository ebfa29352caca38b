"""CUDA graphs of decode steps: for which sizes they are captured, and which one serves a step.

A graph has a fixed number of rows and a fixed bound on the contexts. A step takes the smallest that holds it, and
fills it up with rows without a context. What no graph holds runs without. Pure but for `DecodeGraphs`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.engine.executors.base import SequenceSlice
from pdserve.engine.executors.cuda.batch import Staging, StepLayout, StepTensors, table_width
from pdserve.engine.executors.cuda.device import Device

_FIRST_CONTEXT = 1024
_CONTEXT_FACTOR = 4
MAX_WORKSPACE_BYTES = 256 << 20
"""What the attention of one graph may take; larger steps gain little from a graph."""


@dataclass(frozen=True, slots=True, order=True)
class GraphSize:
    """A decode step with at most that many sequences, none longer than `max_context` tokens."""

    num_seqs: int
    max_context: int

    def layout(self, block_size: int) -> StepLayout:
        """Every row has one token and is sampled."""
        return StepLayout(
            num_decodes=self.num_seqs,
            num_prefills=0,
            num_tokens=self.num_seqs,
            num_logits=self.num_seqs,
            table_width=table_width(self.max_context, block_size),
            max_decode_context=self.max_context,
            max_prefill_queries=0,
        )


def plan_sizes(
    max_seqs: int, max_model_len: int, workspace_bytes: Callable[[int, int], int], max_workspace_bytes: int
) -> list[GraphSize]:
    """All sizes to capture, the largest first, so that they can share memory.

    Args:
        max_seqs: sequences of a step; 0: no graphs.
        max_model_len: tokens.
        workspace_bytes: of (num_seqs, max_context).
        max_workspace_bytes: of one size; larger ones are left out.
    """
    counts = sorted({count for count in (1, 2, 4, *range(8, max_seqs, 8)) if count < max_seqs} | {max_seqs} - {0})
    contexts = []
    context = _FIRST_CONTEXT
    while context < max_model_len:
        contexts.append(context)
        context *= _CONTEXT_FACTOR
    contexts.append(max_model_len)
    sizes = [GraphSize(count, context) for count in counts for context in contexts]
    return sorted((s for s in sizes if workspace_bytes(s.num_seqs, s.max_context) <= max_workspace_bytes), reverse=True)


def find_size(sizes: list[GraphSize], num_seqs: int, max_context: int) -> GraphSize | None:
    """The smallest size that holds a step; None: no size does."""
    holding = [size for size in sizes if size.num_seqs >= num_seqs and size.max_context >= max_context]
    return min(holding, default=None)


class DecodeGraphs:
    """The captured graphs of one model and one KV cache.

    Args:
        device: captures.
        forward: a step without waiting for the device: fp32 logits `[num_logits, vocab_size]`.
        sizes: of `plan_sizes`.
        block_size: tokens of a block.
        vocab_size: columns of the logits.
    """

    def __init__(
        self,
        device: Device,
        forward: Callable[[StepTensors, StepLayout], Tensor],
        sizes: list[GraphSize],
        *,
        block_size: int,
        vocab_size: int,
    ) -> None:
        self._sizes, self._block_size = sizes, block_size
        # Of their own, and never moved: every graph finds its numbers where they were when it was captured.
        self._staging = Staging(device)
        self._layouts = {size: size.layout(block_size) for size in sizes}
        self._replays: dict[GraphSize, Callable[[], None]] = {}
        if not sizes:
            return
        self._staging.reserve(max(layout.num_bytes for layout in self._layouts.values()))
        # One for all: a step's logits are used before the next step.
        self._logits = torch.zeros(sizes[0].num_seqs, vocab_size, dtype=torch.float32, device=device.device)
        for size in sizes:
            layout = self._layouts[size]
            step = self._staging.upload(layout, [], block_size)
            self._replays[size] = device.capture(self._body(step, layout, forward))

    @property
    def num_graphs(self) -> int:
        """How many were captured."""
        return len(self._replays)

    def find(self, num_seqs: int, max_context: int) -> GraphSize | None:
        """The graph that serves a decode step; None: none does."""
        return find_size(self._sizes, num_seqs, max_context)

    def replay(self, size: GraphSize, batch: list[SequenceSlice]) -> Tensor:
        """Upload and launch; fp32 logits `[size.num_seqs, vocab_size]`, overwritten by the next replay."""
        self._staging.upload(self._layouts[size], batch, self._block_size)
        self._replays[size]()
        return self._logits[: size.num_seqs]

    def _body(
        self, step: StepTensors, layout: StepLayout, forward: Callable[[StepTensors, StepLayout], Tensor]
    ) -> Callable[[], None]:
        def body() -> None:
            self._logits[: layout.num_logits].copy_(forward(step, layout))

        return body
