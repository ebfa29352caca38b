"""What is to be sent, in order, bounded: when the bus is away for long, the oldest messages go first.

Touched by the event loop's thread only.
"""

from __future__ import annotations

from collections import deque

from pdserve.messages import Message


class Outbox:
    """A queue of messages for many streams, taken in batches of one list per stream."""

    def __init__(self, max_messages: int) -> None:
        self._max_messages = max_messages
        self._queue: deque[tuple[str, Message]] = deque()
        self.num_dropped = 0
        self.num_put = 0
        """All messages ever put, the dropped ones included."""

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, stream: str, message: Message) -> None:
        """Append; when full, forget the oldest."""
        if len(self._queue) >= self._max_messages:
            self._queue.popleft()
            self.num_dropped += 1
        self._queue.append((stream, message))
        self.num_put += 1

    def take(self, max_messages: int) -> dict[str, list[Message]]:
        """Remove the oldest messages, grouped by stream; the order within a stream is kept."""
        batch: dict[str, list[Message]] = {}
        for _ in range(min(max_messages, len(self._queue))):
            stream, message = self._queue.popleft()
            batch.setdefault(stream, []).append(message)
        return batch
