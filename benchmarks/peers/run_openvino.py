"""OpenVINO as an engine of `benchmarks.peers`: its CPU plugin, in its own environment.

`…/openvino/bin/python benchmarks/peers/run_openvino.py FOLDER EXPORTED PRECISION THREADS`. optimum-intel exports the
model into the folder EXPORTED once. Then it is transformed as OpenVINO GenAI does before it serves one: attention works
on KV blocks, and logits are computed of the rows that are asked for. It never measures export, transformation or
compilation.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from protocol import prompt_of, serve

MAX_BATCH, MAX_CONTEXT, MAX_PROMPT, CHUNK_TOKENS = 32, 512, 2304, 512
BLOCK_SIZE = 32
"""Tokens; the CPU plugin's own, checked below."""
TYPES = {"fp32": "f32", "bf16": "bf16"}
_WANTED_ROWS = "wanted_rows"
_FILE = "model.xml"


class Piece(NamedTuple):
    """Tokens of one sequence: they follow `past` tokens, and their KV lies in blocks of `table`."""

    tokens: Sequence[int]
    past: int
    table: Sequence[int]


class OpenvinoSteps:
    """`protocol.Steps` with OpenVINO's CPU plugin, its KV in blocks that are ours to give."""

    def __init__(self, folder: str, exported: str, precision: str, threads: str) -> None:
        import openvino  # noqa: PLC0415  not there where the pure functions are tested

        self.versions = {"openvino": openvino.__version__}
        if not (Path(exported) / _FILE).exists():
            _export(folder, Path(exported))
        model = _transformed(openvino.Core().read_model(Path(exported) / _FILE))
        compiled = openvino.Core().compile_model(model, "CPU", settings_of(precision, int(threads)))
        self._request = compiled.create_infer_request()
        per_sequence = MAX_CONTEXT // BLOCK_SIZE
        self._tables = [range(i * per_sequence, (i + 1) * per_sequence) for i in range(MAX_BATCH)]
        end = MAX_BATCH * per_sequence
        self._prompt_table = range(end, end + MAX_PROMPT // BLOCK_SIZE)
        self._give_kv(compiled, self._prompt_table.stop, precision)
        self._num_filled = 0
        self._num_prompts = MAX_BATCH

    def decode(self, batch: int, context: int, steps: int) -> list[float]:
        """Seconds of each decode step, as `protocol.Steps.decode` defines them."""
        assert context + steps < MAX_CONTEXT, (context, steps)
        for index in range(self._num_filled, batch):
            self._compute(prompt_of(index, context), self._tables[index])
            self._num_filled = index + 1
        seconds = []
        for step in range(-1, steps):  # the first is not counted
            pieces = [Piece([9 + i], context + step + 1, table) for i, table in enumerate(self._tables[:batch])]
            start_s = time.perf_counter()
            self._run(pieces)
            seconds.append(time.perf_counter() - start_s)
        return seconds[1:]

    def prefill(self, tokens: int) -> list[float]:
        """Seconds of one prompt, as `protocol.Steps.prefill` defines them."""
        self._num_prompts += 1
        prompt = prompt_of(self._num_prompts, tokens)
        start_s = time.perf_counter()
        self._compute(prompt, self._prompt_table)
        return [time.perf_counter() - start_s]

    def greedy(self, tokens: list[int], num: int) -> list[int]:
        """The most likely next tokens, as `protocol.Steps.greedy` defines them."""
        found = [self._compute(tokens, self._prompt_table)]
        while len(found) < num:
            piece = Piece([found[-1]], len(tokens) + len(found) - 1, self._prompt_table)
            found.append(int(self._run([piece])[0].argmax()))
        return found

    def _compute(self, prompt: Sequence[int], table: Sequence[int]) -> int:
        best = -1
        for start in range(0, len(prompt), CHUNK_TOKENS):
            best = int(self._run([Piece(prompt[start : start + CHUNK_TOKENS], start, table)])[0].argmax())
        return best

    def _run(self, pieces: Sequence[Piece]) -> np.ndarray:
        """Logits [pieces, vocabulary] of each piece's last token; valid until the next run."""
        self._request.infer(inputs_of(pieces), share_inputs=True)
        logits: np.ndarray = self._request.get_tensor("logits").data[:, 0]
        assert len(logits) == len(pieces), logits.shape
        return logits

    def _give_kv(self, compiled: Any, num_blocks: int, precision: str) -> None:
        import openvino  # noqa: PLC0415  see above

        caches = [port for port in compiled.inputs if "_cache." in port.any_name]
        assert caches, "no KV blocks among the model's inputs"
        for port in caches:
            _, *dims = port.partial_shape
            shape = [num_blocks, *(dim.get_length() for dim in dims)]
            assert shape[2] == BLOCK_SIZE, shape
            assert port.element_type.get_type_name() == TYPES[precision], port.element_type
            self._request.set_tensor(port, openvino.Tensor(port.element_type, shape))


def settings_of(precision: str, threads: int) -> dict[str, str | int]:
    """Settings of the CPU plugin.

    By itself it would compute in bf16 where the processor can, and keep KV in 16 or 8 bits.
    """
    return {
        "INFERENCE_PRECISION_HINT": TYPES[precision],
        "KV_CACHE_PRECISION": TYPES[precision],
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": threads,
    }


def inputs_of(pieces: Sequence[Piece]) -> dict[str, np.ndarray]:
    """Inputs of one run: the tokens of all pieces behind each other, and where each piece and its KV blocks lie."""
    lengths = [len(piece.tokens) for piece in pieces]
    ends = [piece.past + length for piece, length in zip(pieces, lengths, strict=True)]
    blocks = [piece.table[: -(-end // BLOCK_SIZE)] for piece, end in zip(pieces, ends, strict=True)]
    begins = np.cumsum([0, *lengths])
    return {
        "input_ids": np.concatenate([np.asarray(piece.tokens, np.int64) for piece in pieces]),
        "position_ids": np.concatenate([np.arange(p.past, end) for p, end in zip(pieces, ends, strict=True)]),
        "past_lens": np.array([piece.past for piece in pieces], np.int32),
        "subsequence_begins": begins.astype(np.int32),
        "block_indices": np.concatenate([np.asarray(some, np.int32) for some in blocks]),
        "block_indices_begins": np.cumsum([0, *map(len, blocks)]).astype(np.int32),
        "max_context_len": np.array(max(ends), np.int32),
        _WANTED_ROWS: begins[1:] - 1,
    }


def _export(folder: str, destination: Path) -> None:
    """Write the model as optimum-intel exports it, in fp32, whole or not at all."""
    import openvino  # noqa: PLC0415  see above
    from optimum.intel import OVModelForCausalLM  # noqa: PLC0415

    exported = OVModelForCausalLM.from_pretrained(
        folder, export=True, compile=False, load_in_8bit=False, local_files_only=True
    )
    unfinished = destination.with_name(destination.name + ".part")
    unfinished.mkdir(parents=True, exist_ok=True)
    openvino.save_model(exported.model, unfinished / _FILE, compress_to_fp16=False)
    unfinished.rename(destination)


def _transformed(model: Any) -> Any:
    """The model over KV blocks, whose last product has the wanted rows alone: an input of its own names them."""
    from openvino import opset13  # noqa: PLC0415  see above
    from openvino._offline_transformations import paged_attention_transformation  # noqa: PLC0415

    paged_attention_transformation(model)
    head = model.output("logits").get_node().input_value(0).get_node()
    assert head.get_type_name() == "MatMul", head
    wanted = opset13.parameter([-1], np.int64, name=_WANTED_ROWS)
    wanted.output(0).set_names({_WANTED_ROWS})
    rows = opset13.gather(head.input_value(0), wanted, opset13.constant(0, np.int64))  # rows x 1 x hidden
    head.input(0).replace_source_output(rows.output(0))
    model.add_parameters([wanted])
    model.validate_nodes_and_infer_types()
    return model


if __name__ == "__main__":
    serve(OpenvinoSteps, *sys.argv[1:])
