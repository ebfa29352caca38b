"""Step 7 of 8: the decode worker takes over prompts that a prefill worker computed, and generates tokens.

A DecodeJob names the prefill worker; all blocks are reserved or the job is refused at once; the hand-offs fill them;
then the sequence joins the batched decode loop, and each step sends ONE stream entry per gateway.
Before: step 6, decode_worker/hand_offs.py. After: step 8, gateway/http/sse.py.
It never samples output index 0 of a hand-off itself: token 0 comes from the prefill worker. What both roles do is in
worker/role_worker.py.
"""

from __future__ import annotations

import dataclasses

from pdserve.decode_worker.hand_off import HandOff
from pdserve.decode_worker.hand_offs import HandOffs
from pdserve.decode_worker.prefill_peers import PrefillPeers
from pdserve.engine.engine import StepOutput
from pdserve.errors import InvalidRequestError, NoCapacityError
from pdserve.messages import AnyMessage, DecodeJob, KvFailed, KvReady, Timing
from pdserve.reasons import FailReason
from pdserve.registration import Role, WorkerRef
from pdserve.worker.attempts import Attempt
from pdserve.worker.role_worker import RoleWorker
from pdserve.worker.tasks import TaskSet


class DecodePart:
    """What only a decode worker does; every method runs on the event loop.

    Args:
        worker: the worker that this is a part of.
        hand_offs: the decode side of all hand-offs.
        peers: the prefill workers that can be read from.
        may_prefill: LOCAL_PREFILL=auto: the prompt of a failed hand-off is computed here.
    """

    role = Role.DECODE

    def __init__(self, worker: RoleWorker, hand_offs: HandOffs, peers: PrefillPeers, *, may_prefill: bool) -> None:
        self._worker = worker
        self._hand_offs = hand_offs
        self._peers = peers
        self._may_prefill = may_prefill
        self._tasks = TaskSet()
        hand_offs.report_to(self)

    def handle(self, message: AnyMessage) -> None:
        """Take a job, or what a prefill worker says about a hand-off."""
        match message:
            case DecodeJob():
                self._begin(message)
            case KvReady():
                self._hand_offs.ready(message)
            case KvFailed():
                self._hand_offs.failed(message)
            case _:
                self._worker.watch.late_message("unknown")

    def _begin(self, job: DecodeJob) -> None:
        attempt = self._worker.admit(job)
        if attempt is None:
            return
        if job.prefill is None:
            self._worker.compute(attempt)
        else:
            self._tasks.spawn(self._receive(attempt, job.prefill))

    async def _receive(self, attempt: Attempt, prefill: WorkerRef) -> None:
        """Reserve all blocks or refuse at once, then ask the prefill worker for its own."""
        thread, watch = self._worker.engine_thread, self._worker.watch
        chain_hashes = thread.engine.chain_hashes(attempt.sequence)
        descriptor = await self._peers.find(prefill)
        if isinstance(descriptor, str):
            self._worker.fail(attempt, FailReason.HANDOFF_FAILED, retryable=True, detail=descriptor)
            return
        if not self._worker.holds(attempt):
            return
        try:
            num_cached_blocks = await thread.call(lambda engine: engine.reserve(attempt.sequence))
        except NoCapacityError as error:
            watch.job("rejected")
            self._worker.fail(attempt, FailReason.NO_CAPACITY, retryable=True, detail=str(error))
        except InvalidRequestError as error:
            self._worker.fail(attempt, FailReason.TOO_LONG, retryable=False, detail=error.message)
        else:
            watch.job("accepted")
            if self._worker.holds(attempt):
                self._hand_offs.begin(attempt.sequence, descriptor, num_cached_blocks, chain_hashes)

    # --- what hand-offs report

    def on_received(self, hand_off: HandOff) -> None:
        """Join the decode loop: all blocks are here and verified, token 0 is known."""
        attempt = self._worker.attempts.get(hand_off.sequence.key)
        if attempt is None or hand_off.token0 is None:
            return
        token0, logprobs = hand_off.token0, hand_off.token0_logprobs
        attempt.add_token(token0, logprobs)
        attempt.timing = Timing(transfer_s=hand_off.transfer_s, transfer_bytes=hand_off.num_bytes)
        self._worker.engine_thread.post_output(
            lambda engine: _without_tokens(engine.activate(attempt.sequence, token0, logprobs))
        )

    def on_hand_off_failed(self, hand_off: HandOff, reason: FailReason) -> None:
        """Compute the prompt here if allowed and token 0 is known, else give up; no READ is in flight any more."""
        attempt = self._worker.attempts.get(hand_off.sequence.key)
        if attempt is None:
            return
        if not self._may_prefill or hand_off.token0 is None:
            self._worker.fail(attempt, reason, retryable=True, detail="hand-off failed")
            return
        token0, logprobs = hand_off.token0, hand_off.token0_logprobs
        self._worker.watch.local_prefill(attempt.sequence.num_prompt_tokens)
        attempt.add_token(token0, logprobs)
        self._worker.engine_thread.post_output(
            lambda engine: _without_tokens(engine.recompute(attempt.sequence, token0, logprobs))
        )

    # --- the engine's output

    def on_admitted(self, attempt: Attempt) -> None:
        """Nothing to tell: the gateway learns of a decode worker's work by its tokens."""

    def on_tokens(self, attempts: list[Attempt]) -> None:
        """Nothing to add: tokens are published as they are."""

    def on_step(self, output: StepOutput) -> None:
        """Nothing to go on with: the sequence stays in the decode loop."""

    # --- ends

    def release(self, attempt: Attempt, *, has_failed: bool) -> None:
        """Give up the attempt's hand-off, or stop computing."""
        if not self._hand_offs.abort(attempt.key):
            self._worker.engine_thread.post(lambda engine: engine.abort(attempt.sequence))

    # --- heartbeat, registration, drain

    def heartbeat(self, now_s: float) -> None:
        """Renew KV leases, and give up hand-offs that stand still or lost their peer."""
        self._hand_offs.heartbeat(now_s)

    def window(self, num_gateways: int) -> int:
        """KV blocks that each gateway may have outstanding here; none while one more sequence would slow all down."""
        if not self._worker.engine_thread.engine.can_join_decode:
            return 0
        return max(1, self._worker.watch.num_available_blocks() // num_gateways)

    @property
    def num_held(self) -> int:
        """Attempts and hand-offs that a drain waits for."""
        return len(self._worker.attempts.active()) + self._hand_offs.num_open

    def forget_all(self) -> None:
        """Settle what was given up: no READ is active any more."""
        self._hand_offs.forget_all()


def _without_tokens(output: StepOutput | None) -> StepOutput | None:
    """Leave token 0 of a hand-off out: it is in the attempt already, and only what it ended is news."""
    return None if output is None else dataclasses.replace(output, tokens=[])
