"""Runs the stages of a verification: start a service, compare every answer, look at the KV ledgers at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.errors import PdserveError
from pdserve.local.service import PrivateService
from pdserve.models.resolve import home_folder, resolve_model
from pdserve.verify.ask import Asking, ServiceAnswer, ask_all
from pdserve.verify.compare import MAX_TIE_GAP, Comparison, Tally, Verdict, compare, first_difference
from pdserve.verify.plan import Pass, Stage
from pdserve.verify.progress import Progress
from pdserve.verify.prompts import VerifyPrompt, chat_prompts, token_prompts

if TYPE_CHECKING:  # torch and transformers take seconds to import: only once something is verified
    from pdserve.verify.reference import Reference

_BLOCK_SIZE = 16
_KV_LEASE_S = 5
_LEDGER_TIMEOUT_S = 3.0 * _KV_LEASE_S


class VerifyError(PdserveError):
    """Verification itself could not be done, or the service did not give its blocks back."""


class Verification:
    """A whole verification; `tally` has the sums.

    Args:
        env: PDS_HOME says where models are kept.
        progress: what the user sees.
    """

    def __init__(self, env: Mapping[str, str], progress: Progress) -> None:
        self.tally = Tally()
        self._home, self._progress = home_folder(env), progress
        self._references: dict[Path, Reference] = {}
        self._ledgers_are_ok = True

    @property
    def is_ok(self) -> bool:
        """All equal (but for a few ties), and every KV block given back."""
        return self.tally.is_ok and self._ledgers_are_ok

    def run(self, stage: Stage) -> None:
        """Verify one stage: start its service, compare every answer, look at the ledgers.

        Raises:
            PdserveError: the model or the service cannot be had.
        """
        path = resolve_model(stage.model, self._home, self._progress.line)
        reference = self._reference(path)
        prompts = make_prompts(reference, stage)
        self._compute(reference, prompts, stage.max_tokens)
        settings = {
            "EXECUTOR": stage.executor,
            "TRANSPORT": stage.transport,
            "DTYPE": "float32",
            "KV_DTYPE": "float32",
            "BLOCK_SIZE": _BLOCK_SIZE,
            "KV_LEASE_S": _KV_LEASE_S,
        }
        self._progress.line(
            f"starting a service: {stage.model}, {stage.executor} executor, {stage.transport} transport"
        )
        with PrivateService(path, settings=settings) as service:
            name = reference.card.served_name
            for one in stage.passes:
                self._greedy(service.url, name, stage, one, prompts, reference)
            if stage.num_sampled:
                self._sampled(service.url, name, stage, prompts, reference)
            self._check_ledgers(service)

    def _reference(self, path: Path) -> Reference:
        if path not in self._references:
            self._progress.line("loading the reference (transformers, fp32)")
            from pdserve.verify.reference import Reference  # noqa: PLC0415  see above

            self._references[path] = Reference(path)
        return self._references[path]

    def _compute(self, reference: Reference, prompts: Sequence[VerifyPrompt], max_tokens: int) -> None:
        missing = [prompt for prompt in prompts if not reference.is_known(prompt.token_ids, max_tokens)]
        for prompt in self._progress.over(missing, "reference answers"):
            reference.generate(prompt.token_ids, max_tokens)

    def _greedy(
        self, url: str, name: str, stage: Stage, one: Pass, prompts: Sequence[VerifyPrompt], reference: Reference
    ) -> None:
        asking = Asking(url, name, stage.max_tokens, one.concurrency, one.salt)
        title = f"{stage.model}, {stage.transport}, {one}"
        answers = self._ask(asking, prompts, title)
        for prompt, answer in zip(prompts, answers, strict=True):
            self._take(prompt, _judge(prompt, answer, stage.max_tokens, reference), title)
        num_cached, is_long = sum(answer.num_cached_tokens for answer in answers), _has_full_blocks(prompts)
        if one.is_warm and is_long and not num_cached:
            raise VerifyError(f"{title}: no prompt token came from the prefix cache, so nothing warm was verified")
        self._progress.line(f"{title}: {len(prompts)} prompts compared, {num_cached} prompt tokens were cached")

    def _sampled(
        self, url: str, name: str, stage: Stage, prompts: Sequence[VerifyPrompt], reference: Reference
    ) -> None:
        """The same seed gives the same tokens, alone and in a crowd."""
        chosen = [prompt for prompt in prompts if prompt.message is None][-stage.num_sampled :]
        title = f"{stage.model}, {stage.transport}, seeded sampling"
        alone, crowded = (
            self._ask(Asking(url, name, stage.max_tokens, concurrency, salt, 1.0, 1234), chosen, title)
            for concurrency, salt in ((1, "sampled-alone"), (16, "sampled-crowded"))
        )
        for prompt, one, other in zip(chosen, alone, crowded, strict=True):
            self._take(prompt, _judge_sampled(prompt, one, other, reference), title)
        self._progress.line(f"{title}: {len(chosen)} prompts compared between concurrency 1 and 16")

    def _ask(self, asking: Asking, prompts: Sequence[VerifyPrompt], title: str) -> list[ServiceAnswer]:
        with self._progress.counting(title, len(prompts)) as on_answer:
            return asyncio.run(ask_all(asking, prompts, on_answer))

    def _take(self, prompt: VerifyPrompt, comparison: Comparison, title: str) -> None:
        self.tally.add(comparison)
        if comparison.verdict is not Verdict.EQUAL:
            self._progress.line(f"{comparison.verdict.value.upper()}: {title}: {prompt.name}: {comparison.detail}")

    def _check_ledgers(self, service: PrivateService) -> None:
        try:
            service.wait_until_nothing_is_held(_LEDGER_TIMEOUT_S)
        except PdserveError as error:
            self._ledgers_are_ok = False
            self._progress.line(f"LEDGER: {error}")
        else:
            self._progress.line("KV ledgers: in order, every block was given back")


def make_prompts(reference: Reference, stage: Stage) -> list[VerifyPrompt]:
    """Token prompts and chats of a stage, as far as the model's context allows."""
    longest = min(stage.max_prompt_tokens, reference.card.max_model_len - stage.max_tokens)
    num_chats = stage.num_chats if reference.card.chat_template else 0
    prompts = token_prompts(reference.encode, max(1, stage.num_prompts - num_chats), longest, _BLOCK_SIZE)
    return prompts + chat_prompts(reference.chat_token_ids, num_chats)


def _judge(prompt: VerifyPrompt, answer: ServiceAnswer, max_tokens: int, reference: Reference) -> Comparison:
    if answer.error is not None:
        return Comparison(Verdict.MISMATCH, 0, answer.error)
    comparison = compare(prompt.token_ids, answer.token_ids, max_tokens, reference.generate)
    has_eos = bool(answer.token_ids) and answer.token_ids[-1] in reference.card.eos_token_ids
    expected = "stop" if has_eos else "length"
    if comparison.verdict is not Verdict.MISMATCH and answer.finish_reason != expected:
        detail = f"finish_reason is {answer.finish_reason}, expected {expected}"
        return replace(comparison, verdict=Verdict.MISMATCH, detail=detail)
    return comparison


def _judge_sampled(prompt: VerifyPrompt, one: ServiceAnswer, other: ServiceAnswer, reference: Reference) -> Comparison:
    if one.error or other.error:
        return Comparison(Verdict.MISMATCH, 0, one.error or other.error or "")
    index = first_difference(other.token_ids, one.token_ids)
    if index is None:
        return Comparison(Verdict.EQUAL, len(one.token_ids))
    if index >= min(len(one.token_ids), len(other.token_ids)):
        return Comparison(Verdict.MISMATCH, index, f"{len(other.token_ids)} tokens, alone {len(one.token_ids)}")
    logits = reference.logits_after([*prompt.token_ids, *one.token_ids[:index]])
    gap = abs(float(logits[one.token_ids[index]] - logits[other.token_ids[index]]))
    detail = f"token {index} is {other.token_ids[index]}, alone {one.token_ids[index]} (gap {gap:.2g})"
    return Comparison(Verdict.TIE if gap < MAX_TIE_GAP else Verdict.MISMATCH, index, detail)


def _has_full_blocks(prompts: Sequence[VerifyPrompt]) -> bool:
    return any(len(prompt.token_ids) > 2 * _BLOCK_SIZE for prompt in prompts)
