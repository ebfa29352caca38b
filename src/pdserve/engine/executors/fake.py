"""The fake executor: no model, exact timing, and KV that gives a wrong hand-off away.

Every token's slot holds (token id, position, a mix of both, 1): readable in a dump, exact in float32. In mode
`hash` the next token is a function of *what the slots say*, so KV that was copied wrongly, left out or
overwritten changes the text. Modes: `hash`; `echo` (the prompt again and again); a script of token ids.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.engine.executors.base import KvCacheSpec, SequenceSlice
from pdserve.engine.sequence import Sequence
from pdserve.errors import SettingError

HEAD_DIM = 4
CERTAIN = 50.0
"""The chosen token's logit; all others are 0: any temperature up to 2 draws it, a logit bias of 100 outdoes it."""
Script = dict[str, list[int]] | list[list[int]]


@dataclass(frozen=True, slots=True)
class FakeOptions:
    """What the FAKE_ settings say."""

    ttft_s: float = 0.0
    """Duration of a step that completes a prompt."""
    itl_s: float = 0.0
    """Time between a sequence's tokens, on average over a burst."""
    burst: int = 1
    """Decode steps that come at once, after `burst * itl_s`."""
    start_s: float = 0.0
    """How long loading takes."""
    mode: str = "hash"
    """One of hash, echo and script."""
    script: Script | None = None
    """Token ids by request id (`*`: any other), or a list of them from which the prompt's checksum picks."""

    @classmethod
    def read(cls, *, ttft_s: float, itl_s: float, burst: int, start_s: float, script: str) -> FakeOptions:
        """Read the FAKE_ settings; `script` is `hash`, `echo`, or the path of a JSON file.

        Raises:
            SettingError: no such script.
        """
        tokens = None if script in ("hash", "echo") else _read_script(Path(script))
        mode = script if tokens is None else "script"
        return cls(ttft_s=ttft_s, itl_s=itl_s, burst=burst, start_s=start_s, mode=mode, script=tokens)


def hash_token(token_ids: list[int], vocab_size: int, banned: frozenset[int] = frozenset()) -> int:
    """The token that mode `hash` puts after these: what a test expects, computed without any KV."""
    ids = np.array(token_ids, dtype=np.int64)
    return _pick(_mix(ids, np.arange(len(ids))), vocab_size, banned)


class FakeExecutor:
    """An `Executor` without a model; see `Executor` for the guarantees.

    Args:
        options: timing and mode.
        vocab_size: of the model that it stands for.
        eos_token_ids: never chosen by `hash`; the smallest ends a script.
        block_size: tokens in a block.
        max_model_len: context length, tokens.
        sleep: seconds to let pass.
    """

    name = "fake"
    is_deterministic = True
    reserved_bytes = 0
    device = torch.device("cpu")

    def __init__(
        self,
        options: FakeOptions,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        block_size: int,
        max_model_len: int,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.kv_spec = KvCacheSpec(1, block_size, 1, HEAD_DIM, torch.float32)
        self.kv_cache = torch.zeros(0)
        self._options = options
        self._eos_token_ids = eos_token_ids
        self._sleep = sleep
        self._num_decode_steps = 0
        sleep(options.start_s)

    def allocate_kv_cache(self, num_blocks: int) -> Tensor:
        """Allocate the zeroed KV cache."""
        self.kv_cache = torch.zeros(num_blocks, *self.kv_spec.block_shape, dtype=self.kv_spec.dtype)
        return self.kv_cache

    def run(self, batch: list[SequenceSlice]) -> Tensor:
        """Write every slice's slots, wait as long as a model would, choose the tokens."""
        for piece in batch:
            self._write(piece)
        self._sleep(self._duration_s(batch))
        chosen = [self._next_token(cut) for piece in batch for cut in _cuts(piece)]
        logits = torch.zeros(len(chosen), self.vocab_size)
        logits[range(len(chosen)), chosen] = CERTAIN
        return logits

    # --- KV

    def _write(self, piece: SequenceSlice) -> None:
        positions = np.arange(piece.start, piece.start + len(piece.token_ids))
        cells = _cells(np.array(piece.token_ids, dtype=np.int64), positions)
        block_size = self.kv_spec.block_size
        blocks = np.array(piece.block_table, dtype=np.int64)[positions // block_size]
        self.kv_cache[blocks, 0, :, positions % block_size, 0] = torch.from_numpy(cells)[:, None]

    def _read(self, piece: SequenceSlice) -> NDArray[np.int64]:
        """The cells `[num_tokens, 2, HEAD_DIM]` of all tokens so far, as integers."""
        num_tokens = piece.start + len(piece.token_ids)
        num_blocks = -(-num_tokens // self.kv_spec.block_size)
        cells = self.kv_cache[piece.block_table[:num_blocks], 0, :, :, 0]  # [num_blocks, 2, block_size, HEAD_DIM]
        return cells.transpose(1, 2).flatten(0, 1)[:num_tokens].numpy().astype(np.int64)

    # --- tokens

    def _next_token(self, piece: SequenceSlice) -> int:
        sequence: Sequence = piece.tag
        if self._options.mode == "hash":
            cells = self._read(piece)
            mixed = _mix(cells[:, 0, 0], cells[:, 0, 1])
            # Keys and values say the same; where they do not, the difference becomes part of the text.
            return _pick(mixed + np.abs(cells[:, 0] - cells[:, 1]).sum(1), self.vocab_size, self._eos_token_ids)
        index = sequence.next_output_index
        if self._options.mode == "echo":
            return sequence.prompt_token_ids[index % sequence.num_original_prompt_tokens]
        script = self._script_of(sequence)
        return script[index] if index < len(script) else min(self._eos_token_ids, default=0)

    def _script_of(self, sequence: Sequence) -> list[int]:
        script = self._options.script
        if isinstance(script, dict):
            return script.get(sequence.key.request_id, script.get("*", []))
        assert script, "mode script needs a script"
        prompt = sequence.prompt_token_ids[: sequence.num_original_prompt_tokens]
        return script[zlib.crc32(np.array(prompt, dtype="<i8").tobytes()) % len(script)]

    # --- time

    def _duration_s(self, batch: list[SequenceSlice]) -> float:
        has_prompt = any(piece.samples and len(piece.token_ids) > 1 for piece in batch)
        duration_s = self._options.ttft_s if has_prompt else 0.0
        if any(len(piece.token_ids) == 1 for piece in batch):
            self._num_decode_steps += 1
            if self._num_decode_steps % self._options.burst == 0:
                duration_s = max(duration_s, self._options.itl_s * self._options.burst)
        return duration_s


def _cuts(piece: SequenceSlice) -> list[SequenceSlice]:
    """The slice up to each token whose logits are wanted."""
    num_tokens = len(piece.token_ids)
    ends = range(num_tokens - piece.num_logits + 1, num_tokens + 1)
    return [piece if end == num_tokens else replace(piece, token_ids=piece.token_ids[:end]) for end in ends]


def _mix(token_ids: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """A number below 2**20 per token, different for every other token or place."""
    mixed = (token_ids * 2654435761 + positions * 40503 + 12345) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 15)) * 0x5BD1E995 % 0xFFFFF


def _cells(token_ids: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float32]:
    """`[num_tokens, HEAD_DIM]`: integers below 2**24, exact in float32."""
    return np.stack([token_ids, positions, _mix(token_ids, positions), np.ones_like(positions)], 1).astype(np.float32)


def _pick(mixed: NDArray[np.int64], vocab_size: int, banned: frozenset[int]) -> int:
    weights = np.arange(1, len(mixed) + 1)
    token_id = int((mixed * weights).sum() % vocab_size)
    while token_id in banned and len(banned) < vocab_size:
        token_id = (token_id + 1) % vocab_size
    return token_id


def _read_script(path: Path) -> Script:
    expected = "hash, echo, or a JSON file: token ids, a list of them, or an object from request id (or *) to them"
    try:
        script = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SettingError("FAKE_SCRIPT", str(path), f"{expected} ({error})") from error
    lists = list(script.values()) if isinstance(script, dict) else script
    if isinstance(script, list) and script and all(isinstance(token_id, int) for token_id in script):
        return {"*": script}
    is_valid = isinstance(lists, list) and all(isinstance(ids, list) for ids in lists)
    if not lists or not is_valid or not all(isinstance(t, int) and t >= 0 for ids in lists for t in ids):
        raise SettingError("FAKE_SCRIPT", str(path), expected)
    return script  # type: ignore[no-any-return]
