"""Builds an engine with its scheduler and its block tables, small unless told otherwise."""

from __future__ import annotations

from collections.abc import Callable

from pdserve.engine.engine import Engine
from pdserve.engine.executors.base import Executor
from pdserve.engine.kv.block_tables import BlockTables
from pdserve.engine.scheduling.scheduler import Scheduler


def build_engine(
    executor: Executor,
    *,
    num_blocks: int = 256,
    prefix_cache: bool = True,
    eos_token_ids: frozenset[int] = frozenset({1}),
    clock: Callable[[], float] = lambda: 0.0,
    max_num_batched_tokens: int = 64,
    **scheduling,
) -> Engine:
    """An engine around an executor; `scheduling` as for `Scheduler`."""
    tables = BlockTables(num_blocks, executor.kv_spec.block_size, is_cache_on=prefix_cache, cache_key=b"test")
    defaults = {"max_num_seqs": min(16, max_num_batched_tokens), "max_wait_s": 1e9, "watermark_blocks": 1}
    scheduler = Scheduler(tables, max_num_batched_tokens=max_num_batched_tokens, **{**defaults, **scheduling})
    return Engine(executor, scheduler, eos_token_ids=eos_token_ids, clock=clock)
