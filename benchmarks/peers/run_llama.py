"""llama.cpp as an engine of `benchmarks.peers`: its shared libraries, driven through their C interface.

`python benchmarks/peers/run_llama.py LIBRARIES FILE.gguf PRECISION THREADS`. The package has no headers, so the fields
of its parameter structs that are set here are checked to hold their documented defaults before anything is changed.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from protocol import prompt_of, serve

MAX_BATCH, MAX_CONTEXT, MAX_PROMPT, MICRO_BATCH = 32, 512, 2304, 512
F32, F16 = 0, 1
KV_TYPES = {"fp32": F32, "bf16": F16, "q8_0": F16}
"""16 bits are fp16 here, llama.cpp's fastest."""


class _Params(ctypes.Structure):
    """Larger than any of its structs: what lies behind their end is not looked at."""

    _fields_ = (("words", ctypes.c_int32 * 128),)


class _Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


_FIELDS = {"n_ctx": 0, "n_batch": 1, "n_ubatch": 2, "n_seq_max": 3, "n_threads": 7, "n_threads_batch": 8}
_FIELDS |= {"type_k": 26, "type_v": 27}
_DEFAULTS = {"n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "type_k": F16, "type_v": F16}
"""Word of each field in llama_context_params, and what identifies this layout."""
_pointer, _int = ctypes.c_void_p, ctypes.c_int32
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_model_default_params": (_Params, ()),
    "llama_context_default_params": (_Params, ()),
    "llama_model_load_from_file": (_pointer, (ctypes.c_char_p, _Params)),
    "llama_init_from_model": (_pointer, (_pointer, _Params)),
    "llama_batch_init": (_Batch, (_int, _int, _int)),
    "llama_decode": (_int, (_pointer, _Batch)),
    "llama_synchronize": (None, (_pointer,)),
    "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), (_pointer, _int)),
    "llama_get_memory": (_pointer, (_pointer,)),
    "llama_memory_clear": (None, (_pointer, ctypes.c_bool)),
    "llama_memory_seq_cp": (None, (_pointer, _int, _int, _int, _int)),
    "llama_memory_seq_rm": (ctypes.c_bool, (_pointer, _int, _int, _int)),
    "llama_model_get_vocab": (_pointer, (_pointer,)),
    "llama_vocab_n_tokens": (_int, (_pointer,)),
}
_log_callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_quiet = _log_callback(lambda level, text, data: None)

Piece = tuple[int, int, int, bool]
"""Token, position, sequence, whether its logits are wanted."""


class LlamaSteps:
    """`protocol.Steps` with llama.cpp: one context for prompts, one for many sequences."""

    def __init__(self, libraries: str, file: str, precision: str, threads: str) -> None:
        self._llama = _load(Path(libraries))
        self.versions = {"llama.cpp": _version(self._llama)}
        params = self._llama.llama_model_default_params()
        self._model = self._llama.llama_model_load_from_file(file.encode(), params)
        assert self._model, f"llama.cpp cannot load {file}"
        kv_type = KV_TYPES[precision]
        self._many = self._context(MAX_BATCH * MAX_CONTEXT, MAX_BATCH, int(threads), kv_type)
        self._one = self._context(MAX_PROMPT, 1, int(threads), kv_type)
        self._batch = self._llama.llama_batch_init(MAX_PROMPT, 0, 1)
        self._vocab_size = self._llama.llama_vocab_n_tokens(self._llama.llama_model_get_vocab(self._model))
        self._filled = 0
        self._num_prompts = 0

    def decode(self, batch: int, context: int, steps: int) -> list[float]:
        """Seconds of each decode step, as `protocol.Steps.decode` defines them."""
        self._fill(context)
        seconds = []
        for step in range(-1, steps):  # the first is not counted
            pieces = [(9 + index, context + step + 1, index, True) for index in range(batch)]
            start_s = time.perf_counter()
            self._run(self._many, pieces)
            seconds.append(time.perf_counter() - start_s)
        for index in range(batch):
            assert self._llama.llama_memory_seq_rm(self._memory(self._many), index, context, -1), index
        return seconds[1:]

    def prefill(self, tokens: int) -> list[float]:
        """Seconds of one prompt, as `protocol.Steps.prefill` defines them."""
        self._num_prompts += 1
        prompt = prompt_of(self._num_prompts, tokens)
        start_s = time.perf_counter()
        self._compute(self._one, prompt)
        return [time.perf_counter() - start_s]

    def greedy(self, tokens: list[int], num: int) -> list[int]:
        """The most likely next tokens, as `protocol.Steps.greedy` defines them."""
        found = [self._compute(self._one, tokens)]
        while len(found) < num:
            self._run(self._one, [(found[-1], len(tokens) + len(found) - 1, 0, True)])
            found.append(self._best(self._one, 0))
        return found

    def _fill(self, context: int) -> None:
        """Compute one sequence and copy its KV to the others, each to memory of its own."""
        if self._filled == context:
            return
        self._compute(self._many, prompt_of(0, context))
        for index in range(1, MAX_BATCH):
            self._llama.llama_memory_seq_cp(self._memory(self._many), 0, index, -1, -1)
        self._filled = context

    def _compute(self, context: int, prompt: Sequence[int]) -> int:
        self._llama.llama_memory_clear(self._memory(context), False)
        last = len(prompt) - 1
        for start in range(0, len(prompt), MICRO_BATCH):
            chunk = prompt[start : start + MICRO_BATCH]
            self._run(context, [(token, start + i, 0, start + i == last) for i, token in enumerate(chunk)])
        return self._best(context, -1)

    def _run(self, context: int, pieces: Sequence[Piece]) -> None:
        batch = self._batch
        batch.n_tokens = len(pieces)
        for index, (token, position, sequence, wants_logits) in enumerate(pieces):
            batch.token[index], batch.pos[index], batch.n_seq_id[index] = token, position, 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = wants_logits
        failure = self._llama.llama_decode(context, batch)
        assert failure == 0, f"llama_decode returned {failure}"
        self._llama.llama_synchronize(context)

    def _best(self, context: int, index: int) -> int:
        logits = self._llama.llama_get_logits_ith(context, index)
        return int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())

    def _memory(self, context: int) -> int:
        memory: int = self._llama.llama_get_memory(context)
        return memory

    def _context(self, num_tokens: int, num_sequences: int, threads: int, kv_type: int) -> int:
        params = self._llama.llama_context_default_params()
        found = {name: params.words[_FIELDS[name]] for name in _DEFAULTS}
        assert found == _DEFAULTS, f"another version of llama.cpp than expected: {found}"
        wanted = {"n_ctx": num_tokens, "n_ubatch": MICRO_BATCH, "n_seq_max": num_sequences}
        wanted |= {"n_threads": threads, "n_threads_batch": threads, "type_k": kv_type, "type_v": kv_type}
        for name, value in wanted.items():
            params.words[_FIELDS[name]] = value
        context: int = self._llama.llama_init_from_model(self._model, params)
        assert context, "llama.cpp cannot make a context"
        return context


def _load(folder: Path) -> ctypes.CDLL:
    """Load the libraries in their order and the CPU backend that fits this processor."""
    for pattern in ("libggml-base.so", "libggml.v*.so"):
        ggml = ctypes.CDLL(str(next(folder.glob(pattern))), mode=ctypes.RTLD_GLOBAL)
    llama = ctypes.CDLL(str(next(folder.glob("libllama.v*.so"))), mode=ctypes.RTLD_GLOBAL)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(llama, name)
        function.restype, function.argtypes = result, arguments
    llama.llama_log_set(_quiet, None)
    ggml.ggml_backend_load_all_from_path.argtypes = (ctypes.c_char_p,)
    ggml.ggml_backend_load_all_from_path(str(folder).encode())
    llama.llama_backend_init()
    return llama


def _version(llama: ctypes.CDLL) -> str:
    llama.llama_version.restype = ctypes.c_char_p
    version: bytes = llama.llama_version()
    return version.decode()


if __name__ == "__main__":
    serve(LlamaSteps, *sys.argv[1:])
