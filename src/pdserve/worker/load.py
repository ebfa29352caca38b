"""Makes a warm engine out of settings: resolve the model, load the executor, size the block pool, run once.

Says each stage as it begins (`pdserve-stage: …` on stdout, which `pdserve up` shows). After it the first
request is as fast as the tenth.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from pdserve.engine.engine import Engine
from pdserve.engine.executors.base import Executor
from pdserve.engine.executors.cpu.packed_file import WeightSharing
from pdserve.engine.executors.fake import FakeOptions
from pdserve.engine.kv.block_pool import LedgerReport
from pdserve.engine.kv.block_tables import BlockTables
from pdserve.engine.loader import choose_num_blocks, free_memory_bytes, load_executor
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.scheduling.step_targets import StepTargets
from pdserve.engine.sequence import Sequence
from pdserve.ids import Fingerprint, KvSignature, Nonce, RequestId
from pdserve.log import get_logger
from pdserve.messages import AttemptKey
from pdserve.models.card import ModelCard
from pdserve.models.identity import kv_signature, rope_text
from pdserve.models.resolve import home_folder, resolve_model
from pdserve.process import say_stage
from pdserve.sampling_params import SamplingParams
from pdserve.settings import DecodeSettings, PrefillSettings, WorkerSettings
from pdserve.worker.stages import StartStages

logger = get_logger(__name__)

_WATERMARK_RATIO = 0.02
"""Share of the block pool that admissions leave for the growth of running sequences."""
_NUM_WARM_UP_OUTPUT_TOKENS = 4
_NUM_CPU_WARM_UP_TOKENS = 64
"""Enough to touch all weights; a GPU gets a whole step, for it allocates by the largest one."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A warm engine and who its model is."""

    card: ModelCard
    engine: Engine
    kv_signature: KvSignature
    load_s: float


def load_model(
    settings: WorkerSettings, stages: StartStages, *, clock: Callable[[], float] = time.monotonic
) -> LoadedModel:
    """Load and warm up; notes `model`, `weights`, `KV cache` and `warm-up`.

    Raises:
        ModelError, SettingError: with what to do.
    """
    began_s = clock()
    say_stage("loading the model")
    home = home_folder(os.environ)
    path = resolve_model(settings.model, home, say_stage)
    card = ModelCard.load(path, settings.served_model_name, settings.chat_template, settings.max_model_len)
    stages.done("model")
    executor = _load_executor(settings, card, home)
    stages.done("weights")
    engine = _make_engine(settings, card, executor, clock)
    stages.done("KV cache")
    say_stage("warming up")
    warm_up(engine)
    stages.done("warm-up")
    logger.info(
        "%s: %d KV blocks of %d tokens (%.1f MiB each)",
        card.served_name,
        engine.block_pool.num_blocks,
        engine.block_size,
        executor.kv_spec.block_bytes / 2**20,
    )
    return LoadedModel(card, engine, _signature(card, executor), clock() - began_s)


def warm_up(engine: Engine) -> LedgerReport:
    """Run a long prompt with a few decode steps and two short prompts; leaves nothing but measured step times."""
    longest = (
        _NUM_CPU_WARM_UP_TOKENS if engine.executor.device.type == "cpu" else engine.scheduler.max_num_batched_tokens
    )
    longest = min(longest, engine.scheduler.max_num_batched_tokens, engine.executor.max_model_len // 2)
    longest = max(1, min(longest, (engine.block_pool.num_blocks - 1) * engine.block_size - 8))
    for num_tokens, num_output_tokens in ((longest, _NUM_WARM_UP_OUTPUT_TOKENS), (longest // 4, 1), (longest // 8, 1)):
        _run_alone(engine, max(1, num_tokens), num_output_tokens)
    return engine.check_integrity()


def _run_alone(engine: Engine, num_tokens: int, num_output_tokens: int) -> None:
    key = AttemptKey(RequestId("warm-up"), 0, num_tokens, Nonce(""))
    sampling = SamplingParams(seed=0, max_tokens=num_output_tokens, top_p=0.9, ignore_eos=True)
    prompt = [(7 * index) % engine.vocab_size for index in range(num_tokens)]
    engine.add(Sequence(key, prompt, num_tokens, sampling, is_cacheable=False))
    while engine.has_work:
        engine.step()


def _load_executor(settings: WorkerSettings, card: ModelCard, home: Path) -> Executor:
    fake = FakeOptions.read(
        ttft_s=settings.fake_ttft_s,
        itl_s=settings.fake_itl_s,
        burst=settings.fake_burst,
        start_s=settings.fake_start_s,
        script=settings.fake_script,
    )
    return load_executor(
        card.path,
        executor=settings.executor,
        dtype=settings.dtype,
        kv_dtype=settings.kv_dtype,
        device=settings.device,
        block_size=settings.block_size,
        max_model_len=card.max_model_len,
        threads=settings.threads,
        quantization=settings.quantization,
        deterministic=settings.deterministic,
        fake=fake,
        sharing=WeightSharing(settings.share_weights, home / "packed", free_memory_bytes(torch.device("cpu"))),
        # A prefill worker's sequences end with token 0: it has no decode steps to capture.
        max_decode_seqs=0 if isinstance(settings, PrefillSettings) else settings.max_num_seqs,
        max_batched_tokens=settings.max_num_batched_tokens,
    )


def _make_engine(settings: WorkerSettings, card: ModelCard, executor: Executor, clock: Callable[[], float]) -> Engine:
    num_blocks = _num_blocks(settings, executor)
    tables = BlockTables(
        num_blocks,
        executor.kv_spec.block_size,
        is_cache_on=settings.prefix_cache,
        cache_key=_cache_key(settings.service, card.fingerprint),
    )
    scheduler = Scheduler(
        tables,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_wait_s=settings.max_wait_s,
        watermark_blocks=int(num_blocks * _WATERMARK_RATIO),
        targets=_step_targets(settings),
    )
    return Engine(executor, scheduler, eos_token_ids=card.eos_token_ids, clock=clock)


def _step_targets(settings: WorkerSettings) -> StepTargets:
    """What each role is asked for; the other aim does not occur in it."""
    match settings:
        case PrefillSettings():
            return StepTargets(prompt_step_s=settings.prefill_step_s)
        case DecodeSettings():
            return StepTargets(tpot_s=settings.tpot_slo_s)
        case _:
            return StepTargets()


def _num_blocks(settings: WorkerSettings, executor: Executor) -> int:
    """KV blocks as set; else what the memory holds, but no more than all sequences at full length could ever use."""
    device = executor.device
    num_blocks = choose_num_blocks(
        executor.kv_spec,
        num_blocks=settings.num_blocks,
        kv_memory_bytes=settings.kv_memory_bytes,
        kv_memory_fraction=settings.kv_memory_fraction,
        free_bytes=max(0, free_memory_bytes(device) - executor.reserved_bytes),
        device_type=device.type,
    )
    if settings.num_blocks is not None or settings.kv_memory_bytes is not None:
        return num_blocks
    blocks_per_sequence = -(-executor.max_model_len // executor.kv_spec.block_size)
    return min(num_blocks, settings.max_num_seqs * blocks_per_sequence)


def _cache_key(service: str, fingerprint: Fingerprint) -> bytes:
    """Equal on all workers of a service and model, so that prefill and decode workers can compare chain hashes."""
    return hashlib.blake2b(f"{service}\0{fingerprint}".encode(), digest_size=32, person=b"pdserve-prefix").digest()


def _signature(card: ModelCard, executor: Executor) -> KvSignature:
    spec = executor.kv_spec
    config = json.loads((card.path / "config.json").read_text(encoding="utf-8"))
    return kv_signature(
        card.fingerprint,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        kv_dtype=str(spec.dtype),
        block_size=spec.block_size,
        rope=rope_text(config),
    )
