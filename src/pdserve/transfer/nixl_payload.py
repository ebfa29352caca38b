"""What a NIXL descriptor carries, and the facts about this machine in it. Never imports NIXL."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pdserve.errors import TransferError
from pdserve.transfer.base import Descriptor


class NixlPayload(msgspec.Struct, frozen=True, kw_only=True):
    """`Descriptor.payload` of backend nixl."""

    agent_name: str
    metadata: bytes
    """Opaque to all but NIXL."""
    base_address: int
    """Of block 0."""
    memory: str
    """DRAM | VRAM."""
    device_id: int
    pid: int
    token_address: int
    """Where the wire-up READ and the CMA probe find `token`."""
    token: bytes
    node: str
    """Boot id of the machine; equal in all its containers."""
    has_rdma: bool


_decoder = msgspec.msgpack.Decoder(NixlPayload)


def encode_payload(payload: NixlPayload) -> bytes:
    """For `Descriptor.payload`."""
    return msgspec.msgpack.encode(payload)


def decode_payload(descriptor: Descriptor) -> NixlPayload:
    """Read the payload of a descriptor of backend nixl.

    Raises:
        TransferError: reason lookup.
    """
    try:
        return _decoder.decode(descriptor.payload)
    except msgspec.MsgspecError as error:
        raise TransferError("lookup", f"the NIXL descriptor of {descriptor.peer} is unreadable: {error}") from error


def node_id() -> str:
    """Equal for processes on the same running machine; empty where that cannot be told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def has_rdma(devices: Path = Path("/sys/class/infiniband"), verbs: Path = Path("/dev/infiniband")) -> bool:
    """Whether this process can use an RDMA device with an active port."""
    if not any(verbs.glob("uverbs*")):
        return False
    return any("ACTIVE" in state.read_text() for state in devices.glob("*/ports/*/state"))
