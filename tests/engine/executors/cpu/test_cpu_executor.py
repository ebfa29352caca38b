"""The CPU executor against stock transformers models: every shape, instruction set and weight type."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from cpu_models import Feeder, build, load, run_in_chunks, shuffled_blocks, stock, stock_logits, tokens

from pdserve.engine.executors.base import SequenceSlice
from pdserve.engine.executors.cpu.executor import CpuExecutor, cpu_executor_supports
from pdserve.errors import ModelError, SettingError
from pdserve.kernels.cpu import ops as cpu_ops

pytestmark = pytest.mark.skipif(cpu_ops.why_unavailable() is not None, reason=str(cpu_ops.why_unavailable()))

CHUNKS = [1, 5, 64, 130, 1, 1, 28]
LENGTH = sum(CHUNKS)
TOLERANCE = 1e-4
"""Of the largest logit: fp32 sums in another order."""


def _isas() -> list[str]:
    if cpu_ops.why_unavailable() is not None:
        return ["portable"]
    names = ["avx512_bf16", "avx512", "avx2", "portable"]
    return names[names.index(cpu_ops.load_library().pds_best_isa().decode()) :]


@pytest.fixture(params=_isas())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each instruction set that this machine has."""
    monkeypatch.setenv("PDS_CPU_ISA", request.param)
    return request.param


def _assert_like_stock(folder: Path, vocab_size: int = 131, **options: object) -> None:
    executor = load(folder, **options)
    token_ids = tokens(LENGTH, vocab_size=vocab_size)
    ours = run_in_chunks(executor, Feeder(token_ids, shuffled_blocks(256)), CHUNKS)
    expected = stock_logits(stock(folder), token_ids)[torch.tensor(CHUNKS).cumsum(0) - 1]
    assert ours.shape == expected.shape
    assert (ours - expected).abs().max() <= TOLERANCE * expected.abs().max()


ARCHITECTURES = {
    "llama": {},
    "llama with all biases": {"attention_bias": True, "mlp_bias": True},
    "llama tied": {"tie_word_embeddings": True},
    "mistral with a window": {"sliding_window": 40},
    "mistral without a window": {"sliding_window": None},
    "qwen2": {},
    "qwen2 with a window in later layers": {"use_sliding_window": True, "sliding_window": 70, "max_window_layers": 1},
    "qwen3": {},
    "qwen3 with biases": {"attention_bias": True},
}


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_every_architecture_gives_the_logits_of_the_stock_model(tmp_path, case, isa):
    folder = build(tmp_path, case.split()[0], **ARCHITECTURES[case])
    executor = load(folder)
    assert executor.isa == isa
    _assert_like_stock(folder)


SHAPES = {
    "head_dim 64": {"head_dim": 64},
    "head_dim 80": {"head_dim": 80},
    "head_dim 96": {"head_dim": 96},
    "head_dim 128": {"head_dim": 128},
    "odd sizes": {"hidden_size": 75, "intermediate_size": 101, "num_attention_heads": 3, "num_key_value_heads": 3},
    "sizes below a vector": {"hidden_size": 6, "intermediate_size": 7, "num_attention_heads": 2},
    "vocabulary of one panel": {"vocab_size": 32},
    "vocabulary one above a panel": {"vocab_size": 129},
    "wide enough to walk K in pieces": {"hidden_size": 800, "intermediate_size": 1600},
    **{
        f"{heads} heads over {kv_heads}": {
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "hidden_size": heads * 12,
        }
        for heads, kv_heads in ((1, 1), (3, 3), (2, 1), (9, 3), (5, 1), (6, 1), (14, 2), (8, 1))
    },
}


@pytest.mark.parametrize("case", SHAPES)
def test_every_shape_gives_the_logits_of_the_stock_model(tmp_path, case, isa):
    _assert_like_stock(build(tmp_path, **SHAPES[case]), SHAPES[case].get("vocab_size", 131))


@pytest.mark.parametrize("block_size", [4, 8, 16, 32])
def test_every_block_size_gives_the_logits_of_the_stock_model(tmp_path, block_size):
    _assert_like_stock(build(tmp_path), block_size=block_size)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_any_number_of_threads_gives_the_logits_of_the_stock_model(tmp_path, threads):
    _assert_like_stock(build(tmp_path), threads=threads)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_scaled_rope_gives_the_logits_of_the_stock_model(tmp_path, kind):
    scaling = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "linear":
        del scaling["original_max_position_embeddings"]
    _assert_like_stock(build(tmp_path, rope_parameters=scaling))


def test_a_mixed_batch_of_chunks_and_decodes_serves_every_row(tmp_path, isa):
    folder = build(tmp_path, hidden_size=96, num_attention_heads=6)
    executor, model, blocks = load(folder), stock(folder), shuffled_blocks(256)
    lengths = [700, 33, 1, 256, 90, 17, 310]
    feeders = [Feeder(tokens(n, seed=n), [blocks.pop() for _ in range(n // 16 + 1)]) for n in lengths]
    expected = [stock_logits(model, feeder.token_ids) for feeder in feeders]
    source, worst = random.Random(1), 0.0
    while live := [i for i, feeder in enumerate(feeders) if feeder.position < lengths[i]]:
        picked = [i for i in live if source.random() < 0.8] or live
        left = {i: lengths[i] - feeders[i].position for i in picked}
        logits = executor.run([feeders[i].next(min(left[i], source.choice([1, 1, 3, 16, 50, 200]))) for i in picked])
        for row, i in zip(logits, picked, strict=True):
            worst = max(worst, (row - expected[i][feeders[i].position - 1]).abs().max().item())
    assert worst <= TOLERANCE * max(logits.abs().max() for logits in expected)


def test_only_slices_that_sample_get_logits_in_the_order_of_the_batch(tmp_path):
    executor = load(build(tmp_path))
    pieces = [SequenceSlice(tokens(20, seed=i), 0, [2 * i, 2 * i + 1], samples=i % 2 == 1) for i in range(6)]
    logits = executor.run(pieces)
    assert logits.shape == (3, 131)
    assert logits.dtype == torch.float32
    for row, piece in zip(logits, pieces[1::2], strict=True):
        assert torch.equal(executor.run([piece])[0], row)
    assert executor.run(pieces[:1]).shape == (0, 131)


def test_a_step_writes_the_blocks_of_its_slices_and_no_others(tmp_path):
    executor = load(build(tmp_path), num_blocks=8)
    executor.kv_cache.fill_(7.0)
    executor.run([SequenceSlice(tokens(20), 0, [5, 2], samples=True)])
    untouched = [block for block in range(8) if block not in (5, 2)]
    assert (executor.kv_cache[untouched] == 7.0).all()
    assert (executor.kv_cache[5] != 7.0).all()
    assert (executor.kv_cache[2][:, :, :4] != 7.0).all()
    assert (executor.kv_cache[2][:, :, 4:] == 7.0).all()


def test_stale_nan_in_a_reused_block_reaches_no_row(tmp_path, isa):
    executor = load(build(tmp_path), num_blocks=8)
    clean = executor.run([SequenceSlice(tokens(41), 0, [1, 2, 3], samples=True)]).clone()
    executor.kv_cache.fill_(float("nan"))
    assert torch.equal(executor.run([SequenceSlice(tokens(41), 0, [1, 2, 3], samples=True)]), clean)


# --- other weights and other KV


def _rounded_to_int8(weight: torch.Tensor) -> torch.Tensor:
    highest = weight.abs().amax(1, keepdim=True)
    return (weight * (127 / highest)).round() * (highest / 127)


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_rounded_weights_give_the_logits_of_a_stock_model_with_the_same_rounding(tmp_path, kind, isa):
    folder = build(tmp_path, "qwen2", hidden_size=96)
    model = stock(folder)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                weight = module.weight
                weight.copy_(weight.bfloat16().float() if kind == "bfloat16" else _rounded_to_int8(weight))
                if isa == "avx512_bf16":  # multiplies bf16 with bf16
                    module.register_forward_pre_hook(lambda _, inputs: (inputs[0].bfloat16().float(),))
    options = {"dtype": torch.bfloat16} if kind == "bfloat16" else {"quantization": "int8"}
    executor, token_ids = load(folder, **options), tokens(LENGTH)
    ours = run_in_chunks(executor, Feeder(token_ids, shuffled_blocks(256)), CHUNKS)
    expected = stock_logits(model, token_ids)[torch.tensor(CHUNKS).cumsum(0) - 1]
    # a value on the border between two steps of a narrow type may fall either way
    borders = 50 if isa == "avx512_bf16" else 10 if kind == "int8" else 1
    assert (ours - expected).abs().max() <= borders * TOLERANCE * expected.abs().max()


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({"kv_dtype": torch.bfloat16}, 0.02),
        ({"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}, 0.03),
        ({"quantization": "int8", "kv_dtype": torch.bfloat16}, 0.06),
    ],
)
def test_narrow_weights_and_kv_stay_near_the_stock_model(tmp_path, options, bound, isa):
    folder = build(tmp_path, head_dim=80)
    token_ids = tokens(LENGTH)
    ours = run_in_chunks(load(folder, **options), Feeder(token_ids, shuffled_blocks(256)), CHUNKS)
    expected = stock_logits(stock(folder), token_ids)[torch.tensor(CHUNKS).cumsum(0) - 1]
    error = (ours - expected).norm() / expected.norm()
    assert 0 < error <= bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_checkpoint_is_read_exactly(tmp_path, dtype):
    folder = build(tmp_path / "fp32", tie_word_embeddings=True)
    stock(folder).to(dtype).save_pretrained(tmp_path / "half")
    _assert_like_stock(tmp_path / "half")


def test_a_sharded_checkpoint_is_read_whole(tmp_path):
    folder = build(tmp_path / "one")
    stock(folder).save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").exists()
    _assert_like_stock(tmp_path / "shards")


# --- results do not depend on the batch


PRECISIONS = {
    "fp32": {},
    "bf16": {"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16},
    "int8": {"quantization": "int8", "kv_dtype": torch.bfloat16},
}
any_precision = pytest.mark.parametrize("options", PRECISIONS.values(), ids=PRECISIONS)


@any_precision
@pytest.mark.parametrize("arch", ["llama", "mistral"])
def test_a_request_gives_bit_equal_logits_and_kv_in_any_company(tmp_path, arch, options, isa):
    window = {"sliding_window": 100} if arch == "mistral" else {}
    folder = build(tmp_path, arch, hidden_size=96, num_attention_heads=6, **window)
    length, num_blocks = 640, 256
    token_ids, blocks = tokens(length), shuffled_blocks(num_blocks)
    alone = load(folder, threads=1, num_blocks=num_blocks, **options)
    feeder = Feeder(token_ids, blocks[:40])
    whole = run_in_chunks(alone, feeder, [600] + [1] * 40)  # the truth: one chunk, then decoding alone
    truth = {599 + i: row for i, row in enumerate(whole)}
    kv = alone.kv_cache[blocks[:40]].clone()
    for seed, threads in ((1, 1), (2, 2), (3, 3)):
        source = random.Random(seed)
        executor = load(folder, threads=threads, num_blocks=num_blocks, **options)
        table = source.sample(blocks, num_blocks)
        feeder, spare = Feeder(token_ids, table[:40]), table[40:]
        while feeder.position < length:
            count = min(length - feeder.position, source.choice([1, 1, 2, 7, 16, 64, 100, 300]))
            count = 1 if feeder.position >= 600 and source.random() < 0.7 else count
            company = [
                SequenceSlice(tokens(n, seed=n), 0, spare[8 * i : 8 * i + 8], samples=True)
                for i, n in enumerate(source.choices([1, 1, 1, 3, 40, 128], k=source.choice([0, 0, 1, 4, 15])))
            ]
            place = source.randint(0, len(company))
            logits = executor.run([*company[:place], feeder.next(count), *company[place:]])
            if (expected := truth.get(feeder.position - 1)) is not None:
                assert torch.equal(logits[place], expected), (seed, feeder.position)
        assert torch.equal(executor.kv_cache[table[:40]], kv)


def test_a_prefix_computed_by_another_executor_gives_bit_equal_logits(tmp_path, isa):
    folder = build(tmp_path)
    token_ids = tokens(300)
    first, second = load(folder, threads=1), load(folder, threads=2)
    expected = run_in_chunks(first, Feeder(token_ids, list(range(20))), [300])
    second.kv_cache[100:120] = first.kv_cache[:20]
    tail = Feeder(token_ids, list(range(100, 120)), start=256)
    assert torch.equal(run_in_chunks(second, tail, [44]), expected)


@any_precision
def test_rows_whose_logits_nobody_wants_change_neither_the_others_nor_the_kv(tmp_path, options, isa):
    """They end at their keys and values in the last layer; here everything is computed once, for comparison."""
    folder, source = build(tmp_path, hidden_size=96, num_attention_heads=6), random.Random(0)
    whole, picky = load(folder, **options), load(folder, **options)
    lengths = [(1, 0), (1, 40), (200, 0), (33, 600), (1, 600), (1, 7), (90, 16), (1, 3)]
    blocks = shuffled_blocks(256)
    tables = [[blocks.pop() for _ in range((start + count) // 16 + 1)] for count, start in lengths]
    histories = [
        SequenceSlice(tokens(start, seed=start), 0, table, samples=False)
        for (_, start), table in zip(lengths, tables, strict=True)
        if start
    ]
    whole.logits_of_all_tokens(histories)
    assert picky.run(histories).shape == (0, 131)
    ones = [i for i, (count, _) in enumerate(lengths) if count == 1]
    for picked in (range(len(lengths)), ones):  # chunks and decodes; decodes alone
        for chance in (0.0, 0.5, 0.8, 1.0):
            batch = [
                SequenceSlice(tokens(lengths[i][0], seed=i), lengths[i][1], tables[i], source.random() < chance)
                for i in picked
            ]
            ends = torch.tensor([len(piece.token_ids) for piece in batch]).cumsum(0) - 1
            wanted = ends[torch.tensor([piece.samples for piece in batch])]
            assert torch.equal(picky.run(batch), whole.logits_of_all_tokens(batch)[wanted])
            assert torch.equal(picky.kv_cache, whole.kv_cache)


# --- refusals


def _config(**fields: object) -> dict:
    base = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    return {**base, "intermediate_size": 64, "vocab_size": 100, "max_position_embeddings": 128, **fields}


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"model_type": "gemma2"}, "gemma2"),
        ({"model_type": None}, "None"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"head_dim": 20}, "head_dim 20"),
        ({"head_dim": 1024}, "head_dim 1024"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"rope_scaling": {"type": "longrope"}}, "longrope"),
        ({"vocab_size": None}, "vocab_size"),
    ],
)
def test_a_model_that_the_kernels_cannot_run_is_refused_by_name(fields, part):
    assert part in cpu_executor_supports(_config(**fields))


def test_a_model_that_the_kernels_can_run_is_not_refused():
    assert cpu_executor_supports(_config()) is None


def test_switched_off_kernels_refuse_every_model(monkeypatch, tmp_path):
    monkeypatch.setenv("PDS_CPU_KERNELS", "off")
    assert cpu_executor_supports(_config()) == "PDS_CPU_KERNELS=off"
    folder = build(tmp_path)
    with pytest.raises(ModelError, match="PDS_CPU_KERNELS=off; use executor transformers"):
        load(folder)


def test_bad_settings_are_refused_by_name(tmp_path):
    folder = build(tmp_path)
    for options, name in (
        ({"dtype": torch.float16}, "DTYPE"),
        ({"kv_dtype": torch.float16}, "KV_DTYPE"),
        ({"quantization": "fp8"}, "QUANTIZATION"),
        ({"max_model_len": 4096}, "MAX_MODEL_LEN"),
    ):
        with pytest.raises(SettingError, match=name):
            load(folder, **options)


def test_unreadable_folders_are_refused_with_the_reason(tmp_path):
    options = {"dtype": torch.float32, "kv_dtype": torch.float32, "block_size": 16}
    with pytest.raises(ModelError, match="not a readable model folder"):
        CpuExecutor.load(tmp_path / "nothing", **options)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="no JSON object"):
        CpuExecutor.load(tmp_path, **options)
    (tmp_path / "config.json").write_text(json.dumps(_config()))
    with pytest.raises(ModelError, match="safetensors"):
        CpuExecutor.load(tmp_path, **options)


def test_a_checkpoint_that_contradicts_its_configuration_is_refused(tmp_path):
    folder = build(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    with pytest.raises(ModelError, match="gate_proj"):
        load(folder)
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ModelError, match=r"lacks the tensor model\.layers\.2"):
        load(folder)


@pytest.mark.parametrize(
    "piece",
    [
        SequenceSlice([131], 0, [0], samples=True),
        SequenceSlice([-1], 0, [0], samples=True),
        SequenceSlice([1], 0, [256], samples=True),
        SequenceSlice([1], 0, [-1], samples=True),
        SequenceSlice([1], 16, [0], samples=True),
        SequenceSlice([1], 2048, list(range(200)), samples=True),
    ],
)
def test_addresses_out_of_range_never_reach_the_kernels(tmp_path, piece):
    executor = load(build(tmp_path))
    with pytest.raises(AssertionError):
        executor.run([piece])
