"""One NIXL agent: the only file that touches NIXL. Imported lazily, since NIXL exists for Linux alone.

An agent that is destroyed is the only fence there is for an active READ, so nothing outside may keep it alive:
native objects stay in here under integer names, and native exceptions are turned into text at once (a kept
traceback would keep the agent).
"""

from __future__ import annotations

import gc
import importlib
import ipaddress
import itertools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, NewType

import numpy as np

from pdserve.errors import TransferError
from pdserve.reasons import TransferReason

Region = tuple[int, int, int]
"""Address, length in bytes, device id."""

NativeRead = NewType("NativeRead", int)
"""Names a READ that NIXL holds for us."""
NativeList = NewType("NativeList", int)
"""Names a list of pieces of memory that NIXL prepared."""

_log = logging.getLogger(__name__)


def is_loopback(host: str) -> bool:
    """Whether a host name or address means this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def prepare_environment(host: str) -> None:
    """UCX listens on every interface unless told otherwise: on one machine, keep it on the loopback device."""
    if is_loopback(host):
        os.environ.setdefault("UCX_NET_DEVICES", "lo")


def _import_nixl() -> Any:
    try:
        nixl = importlib.import_module("nixl._api")
    except ImportError as error:
        text = str(error)
    else:
        logger = logging.getLogger("nixl")
        logger.handlers.clear()  # it writes to stdout on its own
        logger.propagate = True
        logger.setLevel(max(logger.level, logging.WARNING))
        return nixl
    raise TransferError(
        TransferReason.LOOKUP, f"NIXL cannot be imported ({text}); it exists for Linux: pip install nixl==1.5.1"
    )


class NixlAgent:
    """An agent with the UCX backend. Of one thread at a time; `destroy` is the fence.

    Raises:
        TransferError: reason lookup: NIXL or its UCX backend does not work here.
    """

    def __init__(self, name: str, *, progress_thread: bool) -> None:
        nixl = _import_nixl()
        self.name = name
        self._names = itertools.count(1)
        self._objects: dict[int, Any] = {}
        config = nixl.nixl_agent_config(enable_prog_thread=progress_thread, backends=[])
        self._agent: Any = nixl.nixl_agent(name, config)
        # The list of plugins names files; only creating the backend tells whether it works.
        _, failure = _attempt(self._agent.create_backend, "UCX", {"ucx_error_handling_mode": "peer"})
        if failure:
            raise TransferError(TransferReason.LOOKUP, f"NIXL's UCX backend does not start here: {failure}")

    def register(self, regions: list[Region], memory: str) -> None:
        """Make memory usable in READs."""
        rows = [(address, num_bytes, device_id, "") for address, num_bytes, device_id in regions]
        _, failure = _attempt(self._agent.register_memory, rows, memory)
        if failure:
            raise TransferError(TransferReason.LOOKUP, f"NIXL cannot register {memory} memory: {failure}")

    def metadata(self) -> bytes:
        """What peers need to reach this agent and its registered memory."""
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    def add_peer(self, metadata: bytes, expected_name: str) -> None:
        """Load a peer's metadata (whose integrity was checked) and begin to connect."""
        name, failure = _attempt(self._agent.add_remote_agent, metadata)
        if not failure and name.decode() != expected_name:
            self.remove_peer(name.decode())
            failure = f"its metadata names another agent, {name.decode()}"
        if not failure:
            _, failure = _attempt(self._agent.make_connection, expected_name)
        if failure:
            raise TransferError(TransferReason.CONNECT, f"NIXL cannot connect to {expected_name}: {failure}")

    def remove_peer(self, name: str) -> None:
        """Forget a peer. No fence: its READs must have ended before."""
        _, failure = _attempt(self._agent.remove_remote_agent, name)
        if failure:
            _log.info("NIXL had lost its peer %s before it was removed: %s", name, failure)

    def prepare(self, peer_name: str, regions: list[Region], memory: str) -> NativeList:
        """A list of pieces that READs pick from by index; `peer_name` is "" for local memory."""
        rows = np.array(regions, dtype=np.uint64).reshape(-1, 3)
        handle, failure = _attempt(self._agent.prep_xfer_dlist, peer_name, rows, memory)
        if failure:
            raise TransferError(
                TransferReason.CONNECT, f"NIXL refuses the memory of {peer_name or 'this worker'}: {failure}"
            )
        return NativeList(self._keep(handle))

    def post_read(
        self, local: NativeList, local_ids: list[int], remote: NativeList, remote_ids: list[int]
    ) -> tuple[NativeRead, bool]:
        """Start a READ. The flag: everything was copied before this returned, and `has_ended` need not be asked."""
        objects = self._objects
        handle, failure = _attempt(
            self._agent.make_prepped_xfer,
            "READ",
            objects[local],
            np.array(local_ids, dtype=np.int32),
            objects[remote],
            np.array(remote_ids, dtype=np.int32),
        )
        state = ""
        if not failure:
            state, failure = _attempt(self._agent.transfer, handle)
        if failure:
            raise TransferError(TransferReason.POST, f"NIXL cannot start a READ: {failure}")
        return NativeRead(self._keep(handle)), state == "DONE"

    def has_ended(self, read: NativeRead) -> tuple[bool, str]:
        """Whether nothing is written for a READ any more, and why it failed ("" = it did not)."""
        state, failure = _attempt(self._agent.check_xfer_state, self._objects[read])
        if not failure and state == "ERR":
            failure = "NIXL reports an error"
        return (bool(failure) or state == "DONE", failure)

    def release(self, name: NativeRead | NativeList) -> None:
        """Forget an ended READ or a list of pieces."""
        self._release(name)

    def make_progress(self) -> None:
        """Answer peers' wire-ups and emulated READs; notifications are not used and dropped."""
        _, failure = _attempt(self._agent.get_new_notifs)
        if failure:
            _log.warning("NIXL cannot make progress: %s", failure)

    def destroy(self) -> None:
        """After this no READ of this agent writes anything. Again: nothing."""
        native, self._agent = self._agent, None
        if native is None:
            return
        for name in list(self._objects):
            self._release(name)
        inner = native.agent
        del native
        gc.collect()
        num_references = sys.getrefcount(inner) - 2  # this function's name, and getrefcount's argument
        assert num_references == 0, f"{num_references} references keep NIXL agent {self.name} alive: no fence"

    def _release(self, name: int) -> None:
        _, failure = _attempt(self._objects.pop(name).release)
        if failure:
            _log.warning("NIXL cannot release a handle: %s", failure)

    def _keep(self, handle: Any) -> int:
        name = next(self._names)
        self._objects[name] = handle
        return name


def _attempt(call: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """The result, or why there is none; never the exception itself, whose traceback would keep the agent alive."""
    try:
        return call(*arguments), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
