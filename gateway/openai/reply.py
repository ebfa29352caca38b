"""Sends an answer in the shape of one endpoint, whole or as a stream. Knows neither chat nor completions.

Order of a stream, per choice: opening, pieces, closing; then the usage if asked for, then `[DONE]`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from pdserve.gateway.generation.answer import Answer
from pdserve.gateway.generation.choice_output import ChoiceOutput, Delta
from pdserve.gateway.http.sse import Responder, SlowClientError
from pdserve.gateway.openai.frontend import Call, Frontend
from pdserve.gateway.openai.options import StreamOptions
from pdserve.gateway.openai.usage import usage_of
from pdserve.reasons import CancelReason

Body = dict[str, Any]


class Shape(Protocol):
    """How one endpoint writes choices."""

    def opening(self, output: ChoiceOutput) -> Body | None:
        """Event before a choice's first piece."""

    def piece(self, output: ChoiceOutput, delta: Delta) -> Body:
        """Event with new text."""

    def closing(self, output: ChoiceOutput) -> Body:
        """Event with a choice's finish reason."""

    def usage(self, usage: Body) -> Body:
        """Last event, without choices."""

    def whole(self, choices: list[tuple[ChoiceOutput, Delta]], usage: Body) -> Body:
        """The body of an answer in one piece."""


async def send_answer(
    frontend: Frontend, call: Call, answer: Answer, shape: Shape, options: StreamOptions, num_prompt_tokens: int
) -> None:
    """Send everything; whatever ends this early cancels the answer at once, everywhere.

    Raises:
        RequestError: the request failed.
        SlowClientError: the client does not read.
    """

    def usage() -> Body:
        return usage_of(answer, num_prompt_tokens=num_prompt_tokens, has_timing=options.has_timing)

    record = call.record
    record.finish_reason = "cancelled"
    try:
        if options.is_stream:
            keepalive_s = frontend.limits.sse_keepalive_s
            await _Stream(call.responder, answer, shape, options, keepalive_s).run(usage)
        else:
            while not answer.is_complete:
                await answer.advance()
            await call.responder.json(shape.whole([(output, output.take()) for output in answer.outputs], usage()))
        record.finish_reason = answer.outputs[0].finish_reason or "error"
    except SlowClientError:
        answer.cancel(CancelReason.SLOW_CLIENT)
        raise
    finally:
        record.num_output_tokens, record.token_waits_s = answer.num_output_tokens, answer.token_waits_s
        answer.cancel(CancelReason.CLIENT)


class _Stream:
    """One answer as server-sent events."""

    def __init__(
        self, responder: Responder, answer: Answer, shape: Shape, options: StreamOptions, keepalive_s: float
    ) -> None:
        self._responder, self._answer, self._shape, self._options = responder, answer, shape, options
        self._keepalive_s = keepalive_s
        self._opened: set[int] = set()

    async def run(self, usage: Callable[[], Body]) -> None:
        """Everything up to `[DONE]`."""
        while not self._answer.is_complete:
            try:
                async with asyncio.timeout(self._keepalive_s):
                    outputs = await self._answer.advance()
            except TimeoutError:
                await self._responder.keep_alive()
                continue
            if outputs:
                await self._write(outputs)
        if self._options.has_usage or self._options.has_timing:
            self._responder.add(self._shape.usage(usage()))
        await self._responder.done()

    async def _write(self, outputs: list[ChoiceOutput]) -> None:
        is_first = not self._opened
        for output in outputs:
            self._add(output)
        await self._responder.flush()
        if is_first:
            self._answer.note_first_write()

    def _add(self, output: ChoiceOutput) -> None:
        """Queue the events of one choice; tokens without text wait for the next ones that have some."""
        has_token_ids, index = self._options.has_token_ids, output.index
        if index not in self._opened:
            self._opened.add(index)
            opening = self._shape.opening(output)
            if opening is not None:
                self._responder.add(opening)
        if output.has_text or has_token_ids or output.is_finished:
            delta = output.take()
            if delta.text or delta.entries or (has_token_ids and delta.token_ids):
                self._responder.add(self._shape.piece(output, delta))
        if output.is_finished:
            self._responder.add(self._shape.closing(output))
