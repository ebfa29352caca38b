"""A transport whose READs from one peer never end, and rounds over it on a virtual clock."""

import torch

from pdserve.errors import TransferError
from pdserve.reasons import TransferReason
from pdserve.transfer.base import Descriptor, PullResult, PullState
from pdserve.transfer.descriptor import seal
from pdserve.transfer.pulls.fenced_transport import FencedTransport
from pdserve.transfer.pulls.pull import PullRequest, split_into_reads
from pdserve.transfer.pulls.pull_rounds import PullRounds
from pdserve.transfer.pulls.quarantine import Quarantine
from pdserve.transfer.pulls.verifier import Verifier

BLOCK_BYTES = 1024
DEAF = "deaf"
GOOD = "good"


def descriptor(worker_id):
    return seal(
        Descriptor(
            backend="stubborn",
            worker_id=worker_id,
            generation="g1",
            num_blocks=100,
            block_bytes=BLOCK_BYTES,
            kv_signature="s",
            payload=b"",
        )
    )


class StubbornTransport:
    """READs from the deaf peer never end; others end in the next poll but one. Aborting is no fence."""

    name = "stubborn"

    def __init__(self):
        self.reads = {}
        self.num_handles = 0
        self.connected = set()
        self.num_recreated = 0
        self.is_broken = False
        self.is_good_slow = False
        self.on_poll = lambda: None
        self.log, self.aborted = [], []

    def start_connect(self, peer_descriptor):
        self.connected.add(peer_descriptor.peer)

    def is_connected(self, peer):
        return peer in self.connected

    def pull(self, peer, nonce, remote_ids, local_ids, deadline_s):
        self.num_handles += 1
        self.reads[self.num_handles] = (peer, len(local_ids))
        self.log.append((peer.worker_id, list(local_ids)))
        return self.num_handles

    def poll(self):
        self.on_poll()
        ended = [h for h, (peer, _) in self.reads.items() if peer.worker_id == GOOD and not self.is_good_slow]
        return [PullResult(h, PullState.DONE) for h in ended if self.reads.pop(h)]

    def abort(self, handle):
        self.aborted.append(handle)
        return handle not in self.reads

    def disconnect(self, peer):
        self.connected.discard(peer)

    def another_reader(self):
        self.other = StubbornTransport()
        return self.other

    def recreate(self):
        self.reads.clear()
        self.connected.clear()
        self.num_recreated += 1
        if self.is_broken:
            raise TransferError(TransferReason.LOOKUP, "NIXL's UCX backend does not start here")
        return descriptor(f"new-{self.num_recreated}")

    def serve(self):
        pass

    def close(self):
        self.reads.clear()


class Scene:
    def __init__(self, verify_aside=None):
        self.now_s = 100.0
        self.transport = StubbornTransport()
        self.descriptors = []
        fenced = FencedTransport(
            self.transport,
            Quarantine(20.0, max_blocks=10, clock=self.clock),
            drain_s=2.0,
            on_descriptor=self.descriptors.append,
            clock=self.clock,
        )
        blocks = torch.zeros((100, BLOCK_BYTES), dtype=torch.uint8)
        verifier = Verifier(blocks, aside=verify_aside, faults=None)
        self.rounds = PullRounds([fenced], verifier, drain_s=2.0, faults=None, clock=self.clock)
        self.ends, self.terminals = [], []

    def clock(self):
        return self.now_s

    def begin(self, ticket, worker_id, local_ids, within_s=5.0, digests=()):
        request = PullRequest(
            descriptor(worker_id),
            "n",
            local_ids,
            local_ids,
            list(digests),
            self.now_s + within_s,
            self.ends.append,
            self.terminals.append,
        )
        reads = split_into_reads(len(local_ids), BLOCK_BYTES, 4 * BLOCK_BYTES)
        self.rounds.begin(ticket, request, reads, request.on_end, request.on_terminal)
        return reads

    def advance(self, seconds, num_rounds=3):
        self.now_s += seconds
        for _ in range(num_rounds):
            self.rounds.round()
