"""Which transport serves a pair of workers, and why. Pure, but for the probes that its callers pass in.

A READ over NIXL is *one-sided* when the target's process takes no part in it: shared memory by cross-memory
attach (same machine, permitted), CUDA IPC (device memory on one machine), or RDMA on both sides. Over anything
else UCX emulates READs by messages over TCP; then a reader that dies can take the prefill worker's process down
with it ("Endpoint timeout"), and a READ of a frozen peer can write blocks long after it was given up. So `auto`
takes NIXL for one-sided pairs only, and our own tcp backend for all others.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pdserve.addresses import peer_host
from pdserve.errors import TransferError
from pdserve.reasons import TransferReason
from pdserve.transfer.base import Descriptor, Transport
from pdserve.transfer.nixl.cma import can_read
from pdserve.transfer.nixl.payload import NixlPayload, decode_payload
from pdserve.transfer.nixl.transport import NixlTransport
from pdserve.transfer.tcp.transport import TcpTransport

SETTINGS = ("auto", "nixl", "tcp")
HAZARD = (
    "UCX emulates READs over TCP between these workers: a decode worker that dies in the middle of one can take "
    "the prefill worker's process down. TRANSPORT=auto takes the tcp backend here"
)

_log = logging.getLogger(__name__)


class Choice(NamedTuple):
    """A backend for a pair of workers, and the reason in words."""

    backend: str
    why: str
    is_hazardous: bool = False
    """NIXL was forced for a pair whose READs are not one-sided: warn with `why`."""


def usable_transports(
    setting: str,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    advertise_host: str = "",
    progress_thread: bool = False,
    connect_timeout_s: float = 2.0,
    make_nixl: Callable[..., Transport] = NixlTransport,
) -> list[Transport]:
    """The backends that work on this machine, preferred first.

    Args:
        setting: TRANSPORT: auto | nixl | tcp.
        host: TRANSFER_HOST; port: TRANSFER_PORT; advertise_host: ADVERTISE_HOST (see `TcpTransport`).
        progress_thread: see `NixlTransport`.

    Raises:
        TransferError: reason lookup: the backend that was asked for does not work here.
    """
    assert setting in SETTINGS, f"TRANSPORT is {setting!r}, expected one of {SETTINGS}"
    transports: list[Transport] = []
    if setting != "tcp":
        try:
            if sys.platform != "linux":
                raise TransferError(TransferReason.LOOKUP, f"NIXL exists for Linux, this is {sys.platform}")
            transports.append(
                make_nixl(
                    host=advertise_host or peer_host(host),
                    progress_thread=progress_thread,
                    connect_timeout_s=connect_timeout_s,
                )
            )
        except TransferError as error:
            if setting == "nixl":
                raise
            _log.info("transport nixl is not used: %s", error)
    if setting != "nixl":
        transports.append(
            TcpTransport(host=host, port=port, advertise_host=advertise_host, connect_timeout_s=connect_timeout_s)
        )
    return transports


def choose_backend(
    setting: str,
    own: Sequence[Descriptor],
    peer: Sequence[Descriptor],
    *,
    probe: Callable[[NixlPayload], bool] | None = None,
) -> Choice:
    """How to READ from a peer.

    Args:
        setting: TRANSPORT: auto | nixl | tcp.
        own: this worker's descriptors, one per usable backend.
        peer: the other worker's, their checksums verified.
        probe: whether the peer's memory can be read by cross-memory attach; by default it is tried.

    Raises:
        TransferError: reason lookup: there is no backend that both have (and the setting allows).
    """
    assert setting in SETTINGS, f"TRANSPORT is {setting!r}, expected one of {SETTINGS}"
    ours = {descriptor.backend: descriptor for descriptor in own}
    theirs = {descriptor.backend: descriptor for descriptor in peer}
    both = set(ours) & set(theirs) & ({"nixl", "tcp"} if setting == "auto" else {setting})
    if not both:
        raise TransferError(
            TransferReason.LOOKUP,
            f"no common transport: TRANSPORT={setting}, {sorted(ours)} here, {sorted(theirs)} there; "
            "TRANSPORT=auto or tcp on both sides works everywhere",
        )
    if both == {"tcp"}:
        return Choice("tcp", _why_no_nixl(setting, "nixl" in ours, "nixl" in theirs))
    way, missing = one_sided_way(decode_payload(ours["nixl"]), decode_payload(theirs["nixl"]), probe or _can_read_token)
    if way:
        return Choice("nixl", way)
    if "tcp" in both:
        return Choice("tcp", missing)
    return Choice("nixl", f"forced by TRANSPORT=nixl, though {missing}. {HAZARD}", is_hazardous=True)


def one_sided_way(own: NixlPayload, peer: NixlPayload, can_attach: Callable[[NixlPayload], bool]) -> tuple[str, str]:
    """How READs of this pair are one-sided, or else ("", why they are not)."""
    same_node = bool(own.node) and own.node == peer.node
    common = set(own.ways) & set(peer.ways)
    if same_node and "cuda_ipc" in common:
        return "CUDA IPC: both KV caches are in device memory of one machine", ""
    if "rdma" in common:
        return "RDMA: both sides have an active RDMA port", ""
    if not same_node:
        return "", "the workers are on different machines and do not both have an active RDMA port"
    obstacle = _obstacle_to_shared_memory(own, peer, can_attach)
    return ("", obstacle) if obstacle else ("shared memory: cross-memory attach to the peer's process works", "")


def _obstacle_to_shared_memory(own: NixlPayload, peer: NixlPayload, can_attach: Callable[[NixlPayload], bool]) -> str:
    if own.memory != peer.memory:
        return "one KV cache is in device memory and the other is not, on one machine without RDMA"
    if "cma" not in set(own.ways) & set(peer.ways):
        return "UCX_TLS keeps UCX from shared memory on one of the two sides"
    if not can_attach(peer):
        return "the workers share a machine, but cross-memory attach to the peer's process is not permitted"
    return ""


def _can_read_token(peer: NixlPayload) -> bool:
    return can_read(peer.pid, peer.token_address, peer.token)


def _why_no_nixl(setting: str, is_ours: bool, is_theirs: bool) -> str:
    if setting == "tcp":
        return "TRANSPORT=tcp"
    if is_ours or is_theirs:
        return f"nixl is not usable on {'the peer' if is_ours else 'this worker'}"
    return "nixl is usable on neither side"
