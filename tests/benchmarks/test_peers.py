"""What `benchmarks.peers` decides before a peer runs: who takes part at which precision, and OpenVINO's inputs."""

import sys

import numpy as np
import pytest
from benchmarks.peers.compare import HERE, engines_for
from benchmarks.peers.install import INSTALLERS, is_installed, openvino_python
from benchmarks.peers.servers import DEFAULTS, OURS, TUNED, compared
from benchmarks.report import Row


@pytest.fixture
def peers_openvino(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))  # engines run as scripts
    import run_openvino as peers_openvino  # noqa: PLC0415

    yield peers_openvino
    for name in ("run_openvino", "protocol"):
        sys.modules.pop(name, None)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PDS_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_openvino_and_vllm_take_part_where_they_have_the_precision(home, precision):
    engines = engines_for(precision, home / "model", ["vllm", "openvino"], 2)
    assert [engine.name for engine in engines] == ["pdserve", "vllm", "openvino"]


def test_at_8_bits_only_ours_is_left_of_them(home):
    assert [engine.name for engine in engines_for("q8_0", home / "model", ["vllm", "openvino"], 2)] == ["pdserve"]


def test_a_peer_that_is_not_wanted_does_not_run(home):
    assert [engine.name for engine in engines_for("fp32", home / "model", [], 2)] == ["pdserve"]


def test_a_peer_is_installed_once_its_interpreter_lies_in_its_folder(home):
    assert not any(is_installed(name) for name in INSTALLERS)
    openvino_python().parent.mkdir(parents=True)
    openvino_python().touch()
    assert [name for name in INSTALLERS if is_installed(name)] == ["openvino"]


@pytest.mark.parametrize(("precision", "expected"), [("fp32", "f32"), ("bf16", "bf16")])
def test_openvino_computes_and_keeps_kv_in_the_precision_that_is_compared(peers_openvino, precision, expected):
    settings = peers_openvino.settings_of(precision, 2)
    assert settings["INFERENCE_PRECISION_HINT"] == settings["KV_CACHE_PRECISION"] == expected
    assert settings["INFERENCE_NUM_THREADS"] == 2


def test_a_chunk_of_a_prompt_asks_for_its_last_row_alone(peers_openvino):
    inputs = peers_openvino.inputs_of([peers_openvino.Piece([7, 8, 9], 62, [4, 5, 6, 9])])
    assert inputs["input_ids"].tolist() == [7, 8, 9]
    assert inputs["position_ids"].tolist() == [62, 63, 64]
    assert inputs["block_indices"].tolist() == [4, 5, 6]  # 65 tokens in blocks of 32
    assert inputs["wanted_rows"].tolist() == [2]
    assert inputs["max_context_len"] == 65


def test_a_decode_step_has_one_row_per_sequence_and_its_own_blocks(peers_openvino):
    pieces = [peers_openvino.Piece([1], 63, [0, 1, 2]), peers_openvino.Piece([2], 32, [3, 4, 5])]
    inputs = peers_openvino.inputs_of(pieces)
    assert {name: values.tolist() for name, values in inputs.items()} == {
        "input_ids": [1, 2],
        "position_ids": [63, 32],
        "past_lens": [63, 32],
        "subsequence_begins": [0, 1, 2],
        "block_indices": [0, 1, 3, 4],
        "block_indices_begins": [0, 2, 4],
        "max_context_len": 64,
        "wanted_rows": [0, 1],
    }
    kinds = {name: values.dtype for name, values in inputs.items()}
    assert {name for name, kind in kinds.items() if kind == np.int64} == {"input_ids", "position_ids", "wanted_rows"}


def test_ours_is_compared_with_the_better_figure_of_each_kind():
    def row(engine: str, metric: str, value: float) -> Row:
        return Row(engine, "fp32", "a case", metric, value, "", (value,))

    values = {
        "output throughput": (180.0, 100.0, 120.0),
        "TTFT p50": (1.0, 3.0, 2.0),
        "TTFT p99": (4.0, 5.0, 6.0),
        "ITL p99 while computed": (50.0, 2000.0, 400.0),
    }
    rows = [
        row(engine, metric, of_engine)
        for metric, of_metric in values.items()
        for engine, of_engine in zip((OURS, DEFAULTS, TUNED), of_metric, strict=True)
    ]
    found = compared(rows)
    assert [round(row.value, 6) for row in found] == [1.5, 0.5, 0.8, 0.025, 0.125]
    assert [row.verdict for row in found] == ["PASS", "PASS", "FAIL", "PASS", "PASS"]
