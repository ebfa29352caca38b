"""What lies in a model folder beats what its config.json implies, and every executor reads the same tensors.

The truth is transformers itself on the same folder, except where transformers is wrong or fills in random values.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import model_folders as folders
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pdserve.engine.executors.base import Executor, SequenceSlice
from pdserve.engine.executors.cpu.executor import CpuExecutor
from pdserve.engine.executors.cuda.device import HostDevice
from pdserve.engine.executors.cuda.executor import CudaExecutor, StepBounds
from pdserve.engine.executors.cuda.kernels import eager_kernels
from pdserve.engine.executors.stock.executor import TransformersExecutor
from pdserve.errors import ModelError
from pdserve.kernels.cpu import ops as cpu_ops
from pdserve.models.identity import model_fingerprint
from pdserve.models.tiny import make_model

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"
PROMPT = [40, 300, 7, 99, 256, 13, 201]
NUM_BLOCKS = 8
F32 = torch.float32


def _load_cpu(folder: Path) -> Executor:
    if cpu_ops.why_unavailable() is not None:
        pytest.skip(str(cpu_ops.why_unavailable()))
    return CpuExecutor.load(folder, dtype=F32, kv_dtype=F32, block_size=4, max_model_len=64, threads=1)


def _load_stock(folder: Path) -> Executor:
    return TransformersExecutor.load(
        folder, dtype=F32, kv_dtype=F32, device=torch.device("cpu"), block_size=4, max_model_len=64
    )


def _load_cuda(folder: Path) -> Executor:
    return CudaExecutor.load(
        folder,
        HostDevice(),
        eager_kernels(),
        dtype=F32,
        kv_dtype=F32,
        block_size=4,
        max_model_len=64,
        bounds=StepBounds(0, 64),
    )


Loader = Callable[[Path], Executor]
LOADERS = {"cpu": _load_cpu, "transformers": _load_stock, "cuda": _load_cuda}


@pytest.fixture(params=LOADERS)
def load(request: pytest.FixtureRequest) -> Loader:
    """Each executor."""
    return LOADERS[request.param]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An untied Llama with tokenizer."""
    return make_model(tmp_path / "model", "llama", 0)


@torch.no_grad()
def expected(folder: Path) -> torch.Tensor:
    """Logits after the prompt out of plain transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=F32, attn_implementation="eager").eval()
    logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0, -1]
    return logits


def logits_of(executor: Executor) -> torch.Tensor:
    executor.allocate_kv_cache(NUM_BLOCKS)
    return executor.run([SequenceSlice(PROMPT, 0, list(range(NUM_BLOCKS)), samples=True)])[0].clone()


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


# --- the output head


def test_a_head_of_its_own_is_used_in_a_tied_model(folder: Path, load: Loader) -> None:
    folders.change_config(folder, tie_word_embeddings=True)
    assert_same(logits_of(load(folder)), expected(folder))


def test_one_row_that_differs_makes_a_head_of_its_own(folder: Path, load: Loader) -> None:
    folders.change_config(folder, tie_word_embeddings=True)
    head = load_file(folder / "model.safetensors")[EMBEDDING].clone()
    head[PROMPT[0]] += 0.5
    folders.change_tensors(folder / "model.safetensors", lm_head__weight=head)
    assert_same(logits_of(load(folder)), expected(folder))


def test_a_tied_model_may_bring_an_equal_copy(folder: Path, load: Loader) -> None:
    folders.change_config(folder, tie_word_embeddings=True)
    embedding = load_file(folder / "model.safetensors")[EMBEDDING]
    folders.change_tensors(folder / "model.safetensors", lm_head__weight=embedding.clone())
    assert_same(logits_of(load(folder)), expected(folder))


def test_a_tied_model_needs_no_head(folder: Path, load: Loader) -> None:
    folders.change_config(folder, tie_word_embeddings=True)
    folders.change_tensors(folder / "model.safetensors", removed=(HEAD,))
    assert_same(logits_of(load(folder)), expected(folder))


@pytest.mark.parametrize("tied", [False, None], ids=["untied", "not said"])
def test_an_untied_model_without_a_head_is_refused(folder: Path, load: Loader, tied: bool | None) -> None:
    folders.change_config(folder, tie_word_embeddings=tied)
    folders.change_tensors(folder / "model.safetensors", removed=(HEAD,))
    with pytest.raises(ModelError, match=r"lacks the tensor lm_head\.weight"):
        load(folder)


def test_a_tied_model_with_a_head_in_shards(folder: Path, load: Loader) -> None:
    folders.split(folder)
    folders.change_config(folder, tie_word_embeddings=True)
    assert_same(logits_of(load(folder)), expected(folder))


def test_qwen2_ties_when_its_file_says_so_alone(tmp_path: Path, load: Loader) -> None:
    folder = make_model(tmp_path / "model", "qwen2", 0)
    head = load_file(folder / "model.safetensors")[EMBEDDING].flip(0).contiguous()
    folders.change_tensors(folder / "model.safetensors", lm_head__weight=head)
    assert_same(logits_of(load(folder)), expected(folder))


# --- tensors that the configuration does not expect, or misses


def test_a_bias_that_the_configuration_denies_is_refused(folder: Path, load: Loader) -> None:
    folders.change_tensors(folder / "model.safetensors", model__layers__0__self_attn__q_proj__bias=torch.ones(64))
    with pytest.raises(ModelError, match=r"has the tensor model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(folder)


@pytest.mark.parametrize("field", ["attention_bias", "mlp_bias"])
def test_a_bias_that_the_configuration_asks_for_must_be_there(folder: Path, load: Loader, field: str) -> None:
    folders.change_config(folder, **{field: True})
    with pytest.raises(ModelError, match=r"lacks the tensor .*bias"):
        load(folder)


def test_a_missing_matrix_is_named(folder: Path, load: Loader) -> None:
    folders.change_tensors(folder / "model.safetensors", removed=(QUERY,))
    with pytest.raises(ModelError, match=r"lacks the tensor model\.layers\.0\.self_attn\.q_proj\.weight"):
        load(folder)


# --- files


def test_shards_are_read_like_one_file(folder: Path, load: Loader) -> None:
    before = expected(folder)
    folders.split(folder)
    assert len(set(folders.weight_map(folder).values())) > 1
    assert_same(logits_of(load(folder)), before)


@pytest.mark.parametrize("where", [0, -1], ids=["an earlier file", "a later file"])
def test_every_tensor_comes_from_the_file_that_the_index_names(folder: Path, load: Loader, where: int) -> None:
    before = expected(folder)
    folders.split(folder)
    places = folders.weight_map(folder)
    tensor = HEAD if where == 0 else QUERY
    other = sorted(set(places.values()) - {places[tensor]})[where]
    torch.manual_seed(1)
    stray = torch.randn(load_file(folder / places[tensor])[tensor].shape)
    folders.change_tensors(folder / other, **{tensor.replace(".", "__"): stray})
    assert_same(logits_of(load(folder)), before)


def test_a_whole_file_beats_a_stale_index(folder: Path, load: Loader) -> None:
    names = load_file(folder / "model.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_same(logits_of(load(folder)), expected(folder))


def test_a_whole_file_beats_complete_shards_of_another_model(folder: Path, tmp_path: Path, load: Loader) -> None:
    before, fingerprint = expected(folder), model_fingerprint(folder)
    folders.split(make_model(tmp_path / "other", "llama", 5), to=folder)
    assert_same(expected(folder), before)
    assert_same(logits_of(load(folder)), before)
    assert model_fingerprint(folder) == fingerprint


def test_other_weight_files_are_not_read(folder: Path, tmp_path: Path, load: Loader) -> None:
    before, fingerprint = expected(folder), model_fingerprint(folder)
    other = make_model(tmp_path / "other", "llama", 5)
    for name in ("adapter_model.safetensors", "consolidated.safetensors", "zzz.safetensors"):
        (folder / name).write_bytes((other / "model.safetensors").read_bytes())
    assert_same(logits_of(load(folder)), before)
    assert model_fingerprint(folder) == fingerprint


def test_the_configuration_can_name_the_file(folder: Path, tmp_path: Path, load: Loader) -> None:
    other = make_model(tmp_path / "other", "llama", 5)
    before = model_fingerprint(folder)
    (folder / "tuned.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    folders.change_config(folder, transformers_weights="tuned.safetensors")
    assert_same(logits_of(load(folder)), expected(other))
    assert model_fingerprint(folder) != before


def test_a_single_file_of_another_name_is_the_model(folder: Path, load: Loader) -> None:
    before = expected(folder)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert_same(logits_of(load(folder)), before)


@pytest.mark.parametrize("damage", ["missing", "truncated", "empty", "header", "a tensor less"])
@pytest.mark.parametrize("is_split", [False, True], ids=["one file", "shards"])
def test_damage_is_one_sentence(folder: Path, load: Loader, damage: str, is_split: bool) -> None:
    if is_split:
        folders.split(folder)
    file = sorted(folder.glob("model*.safetensors"))[-1]
    match damage:
        case "missing":
            file.unlink()
        case "a tensor less":
            folders.change_tensors(file, removed=("model.norm.weight",))
        case _:
            sizes = {"truncated": file.stat().st_size - 100, "empty": 0, "header": 40}
            file.write_bytes(file.read_bytes()[: sizes[damage]])
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    assert (
        file.name in str(caught.value) or "model.norm.weight" in str(caught.value) or "no weights" in str(caught.value)
    )
