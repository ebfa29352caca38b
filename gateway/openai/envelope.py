"""What the events and bodies of chat and completions have in common."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from pdserve.gateway.openai.frontend import Call, Frontend
from pdserve.gateway.openai.options import Options, StreamOptions

Body = dict[str, Any]


@dataclass(frozen=True)
class Envelope:
    """The fields around `choices`."""

    head: Body
    options: StreamOptions
    prompt_token_ids: list[list[int]]

    @classmethod
    def of(cls, frontend: Frontend, call: Call, options: Options, prompts: list[list[int]]) -> Envelope:
        """The envelope of one request."""
        head = {
            "id": call.request_id,
            "object": "",
            "created": int(time.time()),
            "model": frontend.card.served_name,
            "system_fingerprint": f"pdserve-{frontend.card.fingerprint[:12]}",
        }
        return cls(head, options.stream, prompts)

    def event(self, kind: str, choices: list[Body]) -> Body:
        """One event; with include_usage each carries a null until the last."""
        event = {**self.head, "object": kind, "choices": choices}
        if self.options.has_usage:
            event["usage"] = None
        return event

    def usage_event(self, kind: str, usage: Body) -> Body:
        """The last event."""
        return {**self.head, "object": kind, "choices": [], "usage": usage}

    def whole(self, kind: str, choices: list[Body], usage: Body) -> Body:
        """A body in one piece."""
        return {**self.head, "object": kind, "choices": choices, "usage": usage}
