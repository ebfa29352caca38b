"""Who a worker is: its id is stable, its generation is new whenever the process starts or thaws."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from pdserve.ids import GenerationId, WorkerId
from pdserve.registration import WorkerRef


def new_generation() -> GenerationId:
    """A fresh generation; never reused."""
    return GenerationId(secrets.token_hex(4))


@dataclass(slots=True)
class Identity:
    """Current identity of this process; only the host renews it."""

    worker_id: WorkerId
    generation: GenerationId = field(default_factory=new_generation)

    @property
    def ref(self) -> WorkerRef:
        """This process as messages and registrations name it."""
        return WorkerRef(self.worker_id, self.generation)

    def renew(self) -> None:
        """Become another process to all others: everything said to the old generation is void."""
        self.generation = new_generation()
