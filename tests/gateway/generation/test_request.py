"""The client's end of a request: what is ready together comes together, and every story has one end."""

from __future__ import annotations

import asyncio

from dispatching import next_events

from pdserve.errors import UnavailableError
from pdserve.gateway.generation.request import FailedEvent, FinishedEvent, Generation, GenerationRequest, TokensEvent
from pdserve.messages import TokenLogprobs
from pdserve.sampling_params import SamplingParams


class Bench:
    def __init__(self, n: int = 1) -> None:
        sampling = SamplingParams(seed=0, max_tokens=8)
        request = GenerationRequest("r", [1], n, sampling, deadline_s=100.0, received_s=1.0)
        self.cancelled: list[str] = []
        self.finished_choices: list[int] = []
        self.generation = Generation(
            request,
            on_cancel=self.cancelled.append,
            on_finish_choice=self.finished_choices.append,
            clock=lambda: 5.0,
        )


async def test_tokens_that_wait_together_come_as_one_event() -> None:
    generation = Bench().generation
    logprobs = [TokenLogprobs(logprob=-float(i), top_token_ids=[], top_logprobs=[]) for i in range(3)]
    generation.push(TokensEvent(0, 0, [10], logprobs[:1]))
    generation.push(TokensEvent(0, 1, [11, 12], logprobs[1:]))
    generation.push(FinishedEvent(0, "length", None, 3))
    assert await next_events(generation) == [
        TokensEvent(0, 0, [10, 11, 12], logprobs),
        FinishedEvent(0, "length", None, 3),
    ]
    assert await next_events(generation) == []


async def test_choices_keep_their_order_among_each_other() -> None:
    generation = Bench(n=2).generation
    for event in (TokensEvent(0, 0, [1]), TokensEvent(1, 0, [2]), TokensEvent(0, 1, [3])):
        generation.push(event)
    assert [(event.choice, event.token_ids) for event in await next_events(generation)] == [  # type: ignore[union-attr]
        (0, [1]),
        (1, [2]),
        (0, [3]),
    ]


async def test_the_reader_waits_until_something_comes() -> None:
    generation = Bench().generation
    reading = asyncio.create_task(next_events(generation))
    await asyncio.sleep(0)
    assert not reading.done()
    generation.push(TokensEvent(0, 0, [1]))
    assert await reading == [TokensEvent(0, 0, [1])]


async def test_an_error_ends_all_choices_once_and_nothing_follows() -> None:
    generation = Bench(n=2).generation
    error = UnavailableError("gone")
    generation.push(TokensEvent(1, 0, [1]))
    generation.push(FailedEvent(error))
    generation.push(FailedEvent(error))
    generation.push(TokensEvent(0, 0, [1]))
    assert await next_events(generation) == [TokensEvent(1, 0, [1]), FailedEvent(error)]
    assert await next_events(generation) == []
    assert (generation.is_done, generation.waterfall.end_s) == (True, 5.0)


async def test_a_choice_that_has_enough_is_reported_once_and_heard_no_more() -> None:
    b = Bench(n=2)
    b.generation.push(TokensEvent(0, 0, [1]))
    b.generation.push(TokensEvent(1, 0, [2]))
    b.generation.finish_choice(0)
    b.generation.finish_choice(0)
    b.generation.push(TokensEvent(0, 1, [3]))
    assert await next_events(b.generation) == [TokensEvent(1, 0, [2])]
    assert b.finished_choices == [0]
    assert not b.generation.is_done


async def test_cancel_wakes_the_reader_with_the_end_and_reaches_the_dispatcher_once() -> None:
    b = Bench()
    reading = asyncio.create_task(next_events(b.generation))
    await asyncio.sleep(0)
    b.generation.cancel("client")
    b.generation.cancel("client")
    assert await reading == []
    assert b.cancelled == ["client"]
