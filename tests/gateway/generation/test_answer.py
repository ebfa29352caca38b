"""One choice's tokens become text, counted as the client receives them, however they are cut into events."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import UnavailableError
from pdserve.gateway.detokenize import Detokenizer
from pdserve.gateway.generation.answer import Answer, ChoiceOutput
from pdserve.gateway.generation.request import (
    FailedEvent,
    FinishedEvent,
    Generation,
    GenerationRequest,
    TokensEvent,
)
from pdserve.gateway.text.stop_strings import StopMatcher
from pdserve.messages import TokenLogprobs
from pdserve.models.tiny_tokenizer import TURN_END, TURN_START, build_tokenizer
from pdserve.reasons import CancelReason
from pdserve.sampling_params import SamplingParams

TOKENIZER = build_tokenizer()
EOS = TOKENIZER.token_to_id(TURN_END)


def new_output(*stops: str, included: bool = False, logprobs: bool = False, min_tokens: int = 0) -> ChoiceOutput:
    return ChoiceOutput(
        0,
        Detokenizer(TOKENIZER),
        stops=StopMatcher(stops, included),
        terminal_ids=frozenset({EOS}),
        hidden_ids=frozenset({EOS, TOKENIZER.token_to_id(TURN_START)}),
        has_logprobs=logprobs,
        min_tokens=min_tokens,
    )


def feed(output: ChoiceOutput, ids: list[int], cuts: list[int], reason: str = "length") -> str:
    edges = sorted({0, len(ids), *[cut % (len(ids) + 1) for cut in cuts]})
    text = ""
    for start, end in itertools.pairwise(edges):
        logprobs = [TokenLogprobs(logprob=-1.0, top_token_ids=[], top_logprobs=[]) for _ in ids[start:end]]
        output.push(TokensEvent(0, start, ids[start:end], logprobs))
        text += output.take().text
    output.finish(FinishedEvent(0, reason, ids[-1] if reason == "stop" and ids else None, len(ids)))
    return text + output.take().text


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("abc 雪👍", max_size=20),
    stops=st.lists(st.text("abc 雪", min_size=1, max_size=3), max_size=3),
    cuts=st.lists(st.integers(0, 100), max_size=6),
    logprobs=st.booleans(),
)
def test_text_and_count_do_not_depend_on_how_tokens_arrive(
    text: str, stops: list[str], cuts: list[int], logprobs: bool
) -> None:
    ids = TOKENIZER.encode(text).ids
    output = new_output(*stops, logprobs=logprobs)
    shown = feed(output, ids, cuts)
    ends = [TOKENIZER.decode(ids[:n]) for n in range(len(ids) + 1)]
    num_needed = next((n for n, end in enumerate(ends) if any(stop in end for stop in stops)), None)
    if num_needed is None:
        assert (shown, output.num_tokens, output.finish_reason) == (text, len(ids), "length")
    else:
        assert output.finish_reason == "stop"
        assert output.num_tokens == num_needed
        assert any(text.startswith(shown + stop) for stop in stops)


@pytest.mark.parametrize("cuts", [[], [1], [1, 2, 3, 4]])
def test_the_token_that_ends_the_sequence_counts_but_brings_no_text(cuts: list[int]) -> None:
    ids = [*TOKENIZER.encode("the cat").ids, EOS]
    output = new_output(logprobs=True)
    assert feed(output, ids, cuts, "stop") == "the cat"
    assert (output.num_tokens, output.finish_reason) == (len(ids), "stop")


def test_an_end_token_as_the_very_first_one() -> None:
    output = new_output()
    assert feed(output, [EOS], [], "stop") == ""
    assert (output.num_tokens, output.finish_reason) == (1, "stop")


def test_an_end_token_in_the_middle_is_an_ordinary_one() -> None:
    ids = [*TOKENIZER.encode("a").ids, EOS, *TOKENIZER.encode("b").ids]
    output = new_output()
    assert feed(output, ids, [1, 2]) == "ab"
    assert output.num_tokens == 3


def test_a_stop_token_is_shown_when_stops_are_included() -> None:
    ids = TOKENIZER.encode("the cat").ids
    shown = ChoiceOutput(0, Detokenizer(TOKENIZER), stops=StopMatcher((), True), terminal_ids=frozenset({ids[-1]}))
    assert feed(shown, ids, [], "stop") == "the cat"
    hidden = ChoiceOutput(0, Detokenizer(TOKENIZER), stops=StopMatcher(()), terminal_ids=frozenset({ids[-1]}))
    assert feed(hidden, ids, [], "stop") == "the c"
    assert shown.num_tokens == hidden.num_tokens == len(ids)


def test_a_stop_string_wins_over_the_length_it_ends_at() -> None:
    ids = TOKENIZER.encode("the cat").ids
    output = new_output("at")
    assert feed(output, ids, []) == "the c"
    assert (output.num_tokens, output.finish_reason) == (len(ids), "stop")


def test_no_stop_string_ends_before_min_tokens() -> None:
    ids = TOKENIZER.encode("aXbXc").ids
    output = new_output("X", min_tokens=3)
    assert feed(output, ids, []) == "aXb"
    assert output.num_tokens == 4


def test_what_the_end_completes_passes_the_stop_strings_too() -> None:
    cut = TOKENIZER.encode("👍").ids[:2]
    output = new_output("\ufffd")
    assert feed(output, [*TOKENIZER.encode("a").ids, *cut], []) == "a"
    assert output.finish_reason == "stop"


def test_entries_cover_every_counted_token_and_join_to_the_text() -> None:
    ids = [*TOKENIZER.encode("the 👍").ids, EOS]
    output = new_output(logprobs=True)
    entries, text = [], ""
    for index, token_id in enumerate(ids):
        logprobs = [TokenLogprobs(logprob=-1.0, top_token_ids=[], top_logprobs=[])]
        output.push(TokensEvent(0, index, [token_id], logprobs))
        delta = output.take()
        entries, text = entries + delta.entries, text + delta.text
    output.finish(FinishedEvent(0, "stop", EOS, len(ids)))
    entries += output.take().entries
    assert len(entries) == output.num_tokens == len(ids)
    assert "".join(entry.text for entry in entries) == text == "the 👍"
    assert entries[-1].is_hidden


@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("before", ["", "the ", "雪"])
@pytest.mark.parametrize("stops", [(), ("zz",), ("\ufffd!",)])
@pytest.mark.parametrize("ending", [[], [EOS], "special"])
@pytest.mark.parametrize("takes", [True, False])
def test_what_a_cut_character_leaves_belongs_to_an_entry(
    cut: int, before: str, stops: tuple[str, ...], ending: Any, takes: bool
) -> None:
    hidden = TOKENIZER.token_to_id(TURN_START)
    ids = [
        *TOKENIZER.encode(before).ids,
        *TOKENIZER.encode("👍").ids[:cut],
        *([hidden] if ending == "special" else ending),
    ]
    output = new_output(*stops, logprobs=True)
    entries, token_ids, text = [], [], ""
    for index, token_id in enumerate(ids):
        output.push(TokensEvent(0, index, [token_id], [TokenLogprobs(logprob=-1.0, top_token_ids=[], top_logprobs=[])]))
        if takes:
            delta = output.take()
            assert len(delta.entries) == len(delta.token_ids)
            entries, token_ids, text = entries + delta.entries, token_ids + delta.token_ids, text + delta.text
    is_stopped = ending == [EOS]
    output.finish(FinishedEvent(0, "stop" if is_stopped else "length", EOS if is_stopped else None, len(ids)))
    delta = output.take()
    entries, token_ids, text = entries + delta.entries, token_ids + delta.token_ids, text + delta.text
    assert token_ids == [entry.token_id for entry in entries] == ids
    assert "".join(entry.text for entry in entries) == text == before + "\ufffd"


# --- several prompts


def new_answer(num_prompts: int) -> tuple[Answer, list[Generation]]:
    generations = [
        Generation(
            GenerationRequest(f"r{n}", [1], 1, SamplingParams(seed=0, max_tokens=8), deadline_s=9.0, received_s=0.0),
            on_cancel=lambda reason: None,
            on_finish_choice=lambda choice: None,
            clock=lambda: 1.0,
        )
        for n in range(num_prompts)
    ]
    outputs = [ChoiceOutput(n, Detokenizer(TOKENIZER), terminal_ids=frozenset()) for n in range(num_prompts)]
    return Answer(generations, outputs, clock=lambda: 1.0, on_tokens=lambda gap_s, num_tokens: None), generations


async def test_the_answers_to_several_prompts_are_read_as_they_come() -> None:
    answer, generations = new_answer(3)
    for which in (1, 0, 2):
        reading = asyncio.create_task(answer.advance())
        await asyncio.sleep(0)
        assert not reading.done()
        generations[which].push(TokensEvent(0, 0, [80]))
        generations[which].push(FinishedEvent(0, "length", None, 1))
        assert [output.index for output in await reading] == [which]
    assert await answer.advance() == []
    assert answer.num_output_tokens == 3


async def test_what_came_before_the_reader_is_not_lost() -> None:
    answer, generations = new_answer(2)
    for generation in generations:
        generation.push(TokensEvent(0, 0, [80]))
    assert [output.index for output in await answer.advance()] == [0, 1]


async def test_a_generation_that_was_cancelled_behind_the_readers_back_is_an_error() -> None:
    answer, generations = new_answer(2)
    reading = asyncio.create_task(answer.advance())
    await asyncio.sleep(0)
    generations[1].cancel(CancelReason.SHUTDOWN)
    with pytest.raises(UnavailableError):
        await reading


async def test_one_failure_ends_the_answer() -> None:
    answer, generations = new_answer(2)
    generations[0].push(FailedEvent(UnavailableError("gone")))
    with pytest.raises(UnavailableError, match="gone"):
        await answer.advance()
