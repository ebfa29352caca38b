"""What a NIXL descriptor carries, and the facts about this machine in it. Never imports NIXL."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pdserve.errors import TransferError
from pdserve.reasons import TransferReason
from pdserve.transfer.base import Descriptor


class NixlPayload(msgspec.Struct, frozen=True, kw_only=True):
    """What `Descriptor.payload` carries for backend nixl."""

    agent_name: str
    metadata: bytes
    """Opaque to all but NIXL."""
    base_address: int
    """Where block 0 begins in the worker's memory."""
    memory: str
    """NIXL's word for where the blocks lie: DRAM or VRAM."""
    device_id: int
    pid: int
    token_address: int
    """Where the wire-up READ and the CMA probe find `token`."""
    token: bytes
    node: str
    """Boot id of the machine; equal in all its containers."""
    ways: list[str]
    """How UCX may READ one-sidedly here: some of cma, cuda_ipc, rdma."""


_decoder = msgspec.msgpack.Decoder(NixlPayload)


def encode_payload(payload: NixlPayload) -> bytes:
    """The bytes that go into `Descriptor.payload`."""
    return msgspec.msgpack.encode(payload)


def decode_payload(descriptor: Descriptor) -> NixlPayload:
    """Read the payload of a descriptor of backend nixl.

    Raises:
        TransferError: reason lookup.
    """
    try:
        return _decoder.decode(descriptor.payload)
    except msgspec.MsgspecError as error:
        raise TransferError(
            TransferReason.LOOKUP, f"the NIXL descriptor of {descriptor.peer} is unreadable: {error}"
        ) from error


def node_id() -> str:
    """Equal for processes on the same running machine; empty where that cannot be told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


_UCX_NAMES = {
    "cma": {"cma", "sm", "shm"},
    "cuda_ipc": {"cuda_ipc", "cuda"},
    "rdma": {"rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "dc", "dc_x", "dc_mlx5", "ib"},
}
"""UCX's names, aliases included, of transports that READ one-sidedly."""


def one_sided_ways(memory: str, ucx_tls: str, *, is_rdma_here: bool) -> list[str]:
    """What UCX may use on this machine, given its UCX_TLS setting ("" = unset)."""
    possible = ["cuda_ipc"] if memory == "VRAM" else ["cma"]
    if is_rdma_here:
        possible.append("rdma")
    return [way for way in possible if _is_allowed(ucx_tls or "all", _UCX_NAMES[way])]


def _is_allowed(ucx_tls: str, names: set[str]) -> bool:
    """UCX_TLS is a list of names to use, or after a ^ of names not to use; a \\ before a name makes it exact."""
    listed = {name.strip().lstrip("\\") for name in ucx_tls.removeprefix("^").split(",")}
    if ucx_tls.startswith("^"):
        return not listed & names
    return "all" in listed or bool(listed & names)


def has_rdma(devices: Path = Path("/sys/class/infiniband"), verbs: Path = Path("/dev/infiniband")) -> bool:
    """Whether this process can use an RDMA device with an active port."""
    if not any(verbs.glob("uverbs*")):
        return False
    return any("ACTIVE" in state.read_text() for state in devices.glob("*/ports/*/state"))
