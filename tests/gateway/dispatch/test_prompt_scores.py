"""Log-probabilities of a prompt come once, in order and before any token, whatever is lost, doubled or repeated."""

from __future__ import annotations

from typing import Any

import pytest
from attempt_bench import D2, P2, Bench, D, P, emitted, ends, of, sent

from pdserve.gateway.dispatch.actions import Action, Requeue, Score, WantDecode
from pdserve.gateway.dispatch.sequence_machine import SequenceMachine
from pdserve.gateway.generation.request import GenerationRequest, Sender
from pdserve.messages import DecodeJob, PrefillJob, PromptLogprobs, ResendTokens, TokenLogprobs
from pdserve.registration import WorkerRef

FIRST, SECOND = (TokenLogprobs(logprob=-float(n), top_token_ids=[n], top_logprobs=[-float(n)], rank=1) for n in (1, 2))


class ScoredBench(Bench):
    """A prompt of three tokens, so two log-probabilities."""

    def __init__(self, **options: Any) -> None:
        super().__init__(prompt_logprobs=1, **options)

    def scores(self, index: int, *entries: TokenLogprobs, worker: WorkerRef = P, key: Any = None) -> list[Action]:
        key = key or self.key
        message = PromptLogprobs(**key._asdict(), **worker._asdict(), index=index, logprobs=list(entries))
        return self.machine.on_prompt_logprobs(message, worker, self.now_s)


def scored(actions: list[Action]) -> list[TokenLogprobs]:
    return [entry for action in of(actions, Score) for entry in action.logprobs]


def resends(actions: list[Action]) -> list[tuple[WorkerRef, int, int | None]]:
    return [(worker, m.from_index, m.from_prompt_index) for worker, m in sent(actions, ResendTokens)]


@pytest.mark.parametrize("pieces", [[(1, FIRST, SECOND)], [(1, FIRST), (2, SECOND)], [(1, FIRST), (1, FIRST, SECOND)]])
def test_pieces_are_handed_on_once_then_tokens_flow(pieces: list[Any]) -> None:
    b = ScoredBench()
    [(_, job)] = sent(b.dispatch(), PrefillJob)
    assert job.sampling.prompt_logprobs == 1
    b.started()
    [(_, decode_job)] = sent(b.assign(), DecodeJob)
    assert decode_job.sampling.prompt_logprobs is None
    assert [entry for piece in pieces for entry in scored(b.scores(*piece))] == [FIRST, SECOND]
    assert emitted(b.tokens(0, 10, worker=P)) == [(0, [10])]
    assert emitted(b.tokens(0, 10, 11, worker=D)) == [(1, [11])]
    assert scored(b.scores(1, FIRST, SECOND)) == []


def test_a_decode_worker_that_computes_the_prompt_scores_it() -> None:
    b = ScoredBench()
    [(_, job)] = sent(b.machine.dispatch_local(D, 0.0, 0), DecodeJob)
    assert job.sampling.prompt_logprobs == 1
    assert scored(b.scores(1, FIRST, SECOND, worker=D)) == [FIRST, SECOND]
    assert emitted(b.tokens(0, 10, worker=D)) == [(0, [10])]


def test_a_piece_tells_that_the_prefill_worker_began() -> None:
    b = ScoredBench()
    b.dispatch()
    assert of(b.scores(1, FIRST), WantDecode) == [WantDecode()]


def test_a_gap_between_pieces_is_asked_for() -> None:
    b = ScoredBench()
    b.until_started()
    actions = b.at(1.0).scores(2, SECOND)
    assert (scored(actions), resends(actions)) == ([], [(P, 0, 1)])
    assert scored(b.scores(1, FIRST, SECOND)) == [FIRST, SECOND]


@pytest.mark.parametrize("worker", [P, D])
def test_no_token_passes_a_missing_score_and_the_worker_that_has_it_is_asked(worker: WorkerRef) -> None:
    b = ScoredBench()
    b.until_started().assign()
    b.scores(1, FIRST)
    actions = b.at(1.0).tokens(0, 10, worker=worker)
    assert (emitted(actions), resends(actions)) == ([], [(P, 0, 2)])
    assert scored(b.scores(2, SECOND)) == [SECOND]
    assert emitted(b.tokens(0, 10, worker=worker)) == [(0, [10])]


def test_no_end_passes_a_missing_score() -> None:
    b = ScoredBench(max_tokens=1)
    b.until_started()
    b.scores(1, FIRST)
    b.at(1.0).tokens(0, 10, worker=P)
    assert ends(b.finished(1, worker=P)) == []
    assert resends(b.at(2.0).tick()) == [(P, 0, 2)]
    b.scores(2, SECOND)
    assert len(ends(b.tokens(0, 10, worker=P))) == 1


@pytest.mark.parametrize("num_known", [0, 1])
def test_a_prefill_worker_that_dies_is_replaced_and_nothing_comes_twice(num_known: int) -> None:
    b = ScoredBench()
    b.until_started().assign()
    got = scored(b.scores(1, *[FIRST, SECOND][:num_known]))
    b.tokens(0, 10, worker=D)  # the decode worker has everything, the client has not
    assert of(b.gone(P), Requeue)
    [(_, job)] = sent(b.dispatch(P2), PrefillJob)
    assert (job.prompt_token_ids, job.sampling.prompt_logprobs) == ([1, 2, 3], 1)
    b.started(P2)
    b.assign(D2)
    got += scored(b.scores(1, FIRST, worker=P2)) + scored(b.scores(2, SECOND, worker=P2))
    assert got == [FIRST, SECOND]
    assert emitted(b.tokens(0, 10, worker=P2)) == [(0, [10])]


def test_scores_of_an_older_attempt_are_ignored() -> None:
    b = ScoredBench()
    b.until_started()
    old = b.key
    b.gone(P)
    b.dispatch(P2)
    assert b.scores(1, FIRST, SECOND, worker=P, key=old) == []
    assert b.machine.num_scored == 1


def test_an_attempt_after_the_first_token_scores_nothing_again() -> None:
    b = ScoredBench()
    b.until_started().assign()
    b.scores(1, FIRST, SECOND)
    b.tokens(0, 10, 11, worker=D)
    b.gone(D)
    [(_, job)] = sent(b.dispatch(P2), PrefillJob)
    assert (job.prompt_token_ids, job.sampling.prompt_logprobs) == ([1, 2, 3, 10, 11], None)


def test_a_prompt_alone_is_dispatched_again_when_its_worker_dies() -> None:
    b = ScoredBench(max_tokens=0)
    b.until_started()
    assert ends(b.gone(P)) == []
    [(_, job)] = sent(b.dispatch(P2), PrefillJob)
    assert not job.will_decode
    b.scores(1, FIRST, SECOND, worker=P2)
    b.tokens(0, 10, worker=P2)
    assert len(ends(b.finished(1, worker=P2))) == 1


def test_the_prompt_is_scored_for_the_first_choice_alone() -> None:
    request: GenerationRequest = ScoredBench().machine.request
    jobs = []
    for choice in range(3):
        machine = SequenceMachine(request, choice, Sender("gw", "f"), ScoredBench().machine.limits)
        jobs += [job for _, job in sent(machine.dispatch(P, 0.0, 0), PrefillJob)]
    assert [job.sampling.prompt_logprobs for job in jobs] == [1, None, None]


def test_a_prompt_of_one_token_has_nothing_to_wait_for() -> None:
    request = ScoredBench().machine.request
    single = GenerationRequest(
        request_id="r", prompt_token_ids=[1], n=1, sampling=request.sampling, deadline_s=9.0, received_s=0.0
    )
    machine = SequenceMachine(single, 0, Sender("gw", "f"), ScoredBench().machine.limits)
    machine.dispatch(P, 0.0, 0)
    assert not machine.lacks_scores
