"""A puller over one real transport whose requests and outcomes a test can follow."""

from __future__ import annotations

import queue
import threading
import time

from pdserve.faults import Faults
from pdserve.transfer.digest import block_digests
from pdserve.transfer.pulls.pull import PullRequest
from pdserve.transfer.pulls.puller import Puller

NONCE = "nonce-of-a-hand-off"
BLOCK_BYTES = 64 * 1024


class Pulling:
    """A puller and its outcomes in the order they came."""

    def __init__(self, local, **options):
        self.local = local
        self.faults = Faults()
        self.ends, self.terminals = queue.Queue(), queue.Queue()
        self.ended_late = set()
        self.descriptors = []
        transport = local.transport
        self.puller = Puller(
            {transport.name: transport},
            local.blocks,
            faults=self.faults,
            on_descriptor=self.descriptors.append,
            **options,
        )
        self.puller.start()

    def submit(self, peer, remote_ids, local_ids, *, digests=None, within_s=5.0):
        request = PullRequest(
            descriptor=peer.descriptor,
            nonce=NONCE,
            remote_ids=remote_ids,
            local_ids=local_ids,
            digests=block_digests(peer.blocks, remote_ids) if digests is None else digests,
            deadline_s=time.monotonic() + within_s,
            on_end=self.ends.put,
            on_terminal=self.terminals.put,
        )
        return self.puller.submit(request)

    def end(self, timeout_s=10.0):
        return self.ends.get(timeout=timeout_s)

    def until_terminal(self, outcome):
        """Wait until no READ of an ended request can write its blocks; another thread's may still be under way."""
        while not outcome.is_terminal and outcome.ticket not in self.ended_late:
            self.ended_late.add(self.terminals.get(timeout=5.0).ticket)

    def pull(self, peer, remote_ids, local_ids, **options):
        ticket = self.submit(peer, remote_ids, local_ids, **options)
        outcome = self.end()
        assert outcome.ticket == ticket
        return outcome


def names_of_threads():
    """Names of the transfer threads that run in this process."""
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("kv-transfer")}
