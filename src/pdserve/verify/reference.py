"""The independent truth: transformers' own `generate`, fp32, one prompt at a time. Shares no code with the engine.

Results are kept, so that each prompt is computed once however often it is compared.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pdserve.models.card import ModelCard

_NUM_ALTERNATIVES = 16
"""Best tokens whose logits are kept per step: a tie is between the very best ones."""


@dataclass(frozen=True, slots=True)
class ReferenceAnswer:
    """What the reference generates for a prompt."""

    token_ids: tuple[int, ...]
    """The end-of-sequence token included."""
    logits: tuple[dict[int, float], ...]
    """Per token: logits of the best tokens of that step, by id."""

    def gap(self, index: int, token_id: int) -> float:
        """How much the reference prefers its own token to `token_id` at output `index`; infinite when by far."""
        best = self.logits[index]
        return best[self.token_ids[index]] - best[token_id] if token_id in best else float("inf")


class Reference:
    """A model folder as transformers runs it."""

    def __init__(self, path: Path, num_threads: int | None = None) -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self.card = ModelCard.load(path)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        self._model.eval()
        self._answers: dict[tuple[tuple[int, ...], int], ReferenceAnswer] = {}

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, without special tokens."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def chat_token_ids(self, message: str) -> list[int]:
        """Ids of one user message in the model's chat template."""
        messages = [{"role": "user", "content": message}]
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self.encode(text)

    def is_known(self, token_ids: Sequence[int], max_tokens: int) -> bool:
        """Whether this answer has been computed already."""
        return (tuple(token_ids), max_tokens) in self._answers

    def generate(self, token_ids: Sequence[int], max_tokens: int) -> ReferenceAnswer:
        """Greedy continuation of a prompt, up to `max_tokens` or an end-of-sequence token."""
        key = (tuple(token_ids), max_tokens)
        if key not in self._answers:
            self._answers[key] = self._generate(list(token_ids), max_tokens)
        return self._answers[key]

    def logits_after(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits of the token that follows, [vocab_size], by one plain forward pass."""
        with torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor([list(token_ids)])).logits[0, -1]
        return logits

    def _generate(self, token_ids: list[int], max_tokens: int) -> ReferenceAnswer:
        prompt = torch.tensor([token_ids])
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice about sampling flags that greedy search does not use
            output = self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=max_tokens,
                do_sample=False,
                num_beams=1,
                temperature=None,
                top_p=None,
                top_k=None,
                repetition_penalty=1.0,
                eos_token_id=sorted(self.card.eos_token_ids) or None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
        best = [step[0].topk(min(_NUM_ALTERNATIVES, step.shape[-1])) for step in output.logits]
        logits = tuple(dict(zip(top.indices.tolist(), top.values.tolist(), strict=True)) for top in best)
        return ReferenceAnswer(tuple(output.sequences[0, len(token_ids) :].tolist()), logits)
