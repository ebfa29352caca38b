"""Every key on the bus, in one place. All keys of one service share a hash tag, so that one MULTI can touch them."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.ids import GatewayId, GenerationId, WorkerId


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one service."""

    service: str

    def __post_init__(self) -> None:
        assert self.service.strip("{}") == self.service != "", f"bad service name {self.service!r}"

    @property
    def prefix(self) -> str:
        """What all keys start with; the braces are Redis' hash tag."""
        return f"pds:{{{self.service}}}:"

    @property
    def workers(self) -> str:
        """ZSET worker id → expiry on the server's clock: the index, so that no process scans."""
        return f"{self.prefix}workers"

    def worker(self, worker_id: WorkerId) -> str:
        """Registration of a worker."""
        return f"{self.prefix}worker:{worker_id}"

    @property
    def gateways(self) -> str:
        """ZSET gateway id → expiry on the server's clock."""
        return f"{self.prefix}gateways"

    def gateway(self, gateway_id: GatewayId) -> str:
        """Registration of a gateway."""
        return f"{self.prefix}gateway:{gateway_id}"

    def inbox(self, worker_id: WorkerId, generation: GenerationId) -> str:
        """Stream to one worker process; a generation is never reused, so neither is its inbox."""
        return f"{self.prefix}inbox:{worker_id}:{generation}"

    def tokens(self, gateway_id: GatewayId) -> str:
        """Stream from all workers to one gateway."""
        return f"{self.prefix}tokens:{gateway_id}"
