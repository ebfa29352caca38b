"""Attempts survive doubled, late and lost messages: jobs are taken once, tokens can be asked for again."""

from __future__ import annotations

import pytest

from pdserve.engine.sequence import Sequence
from pdserve.engine.step_output import StepOutput
from pdserve.messages import (
    AttemptKey,
    Failed,
    Finished,
    Message,
    PromptLogprobs,
    ResendTokens,
    TokenBatch,
    TokenLogprobs,
)
from pdserve.registration import WorkerRef
from pdserve.sampling_params import SamplingParams
from pdserve.worker.attempts import PROMPT_LOGPROBS_PER_MESSAGE, Attempt, Attempts
from pdserve.worker.sender import Sender

Sent = list[tuple[str, Message]]


class Recorder(Sender):
    """A sender whose messages to gateways stay here."""

    def __init__(self) -> None:
        self.sent: Sent = []
        self.full: set[str] = set()

    @property
    def ref(self) -> WorkerRef:
        return WorkerRef("w", "g")

    def to_gateway(self, gateway_id: str, message: Message) -> None:
        self.sent.append((gateway_id, message))

    def is_held_back(self, gateway_id: str) -> bool:
        return gateway_id in self.full


def make_sequence(attempt: int = 1, *, nonce: str = "n", num_emitted: int = 0) -> Sequence:
    return Sequence(
        key=AttemptKey("r", 0, attempt, nonce),
        prompt_token_ids=[1] * (5 + num_emitted),
        num_original_prompt_tokens=5,
        sampling=SamplingParams(seed=1, max_tokens=8),
        deadline_s=100.0,
    )


@pytest.fixture
def sender() -> Recorder:
    return Recorder()


@pytest.fixture
def sent(sender: Recorder) -> Sent:
    return sender.sent


@pytest.fixture
def attempts(sender: Recorder) -> Attempts:
    return Attempts(sender, keep_s=3.0)


def add_tokens(attempt: Attempt, *token_ids: int) -> None:
    for token_id in token_ids:
        attempt.add_token(token_id, None)


def test_the_same_job_is_taken_once_even_after_its_end(attempts: Attempts) -> None:
    sequence = make_sequence()
    assert attempts.is_new(sequence.key)
    attempt = attempts.open(sequence, "gw", 0.0)
    assert not attempts.is_new(sequence.key)
    attempts.end(attempt, 1.0, keeps_tokens=False)
    attempts.prune(50.0)
    assert not attempts.is_new(sequence.key)
    attempts.prune(101.0)
    assert attempts.is_new(sequence.key)  # after the deadline it is not sent any more


def test_a_cancel_that_overtakes_its_job_stops_it(attempts: Attempts) -> None:
    key = make_sequence().key
    attempts.bury(key, 60.0)
    assert not attempts.is_new(key)


def test_a_higher_attempt_supersedes_a_lower_one_and_never_the_reverse(attempts: Attempts) -> None:
    second = attempts.open(make_sequence(2, nonce="b"), "gw", 0.0)
    assert not attempts.is_new(make_sequence(1, nonce="a").key)
    third = make_sequence(3, nonce="c").key
    assert attempts.is_new(third)
    assert attempts.older_than(third) is second


def test_a_step_is_one_batch_per_gateway_with_finished_behind_its_tokens(attempts: Attempts, sent: Sent) -> None:
    a = attempts.open(make_sequence(), "gw1", 0.0)
    other = make_sequence()
    other.key = AttemptKey("s", 0, 1, "m")
    b = attempts.open(other, "gw1", 0.0)
    add_tokens(a, 10, 11)
    add_tokens(b, 20)
    attempts.finish(b, "length", None)
    attempts.publish([a, b])
    assert [type(message) for _, message in sent] == [TokenBatch, Finished]
    batch = sent[0][1]
    assert isinstance(batch, TokenBatch)
    assert [(item.request_id, item.index, item.token_ids) for item in batch.items] == [
        ("r", 0, [10, 11]),
        ("s", 0, [20]),
    ]
    add_tokens(a, 12)
    attempts.publish([a, b])
    later = sent[2][1]
    assert isinstance(later, TokenBatch)
    assert [(item.index, item.token_ids) for item in later.items] == [(2, [12])]
    assert len(sent) == 3  # Finished is not repeated by itself


def test_indices_count_from_the_original_prompt_after_a_re_dispatch(attempts: Attempts, sent: Sent) -> None:
    attempt = attempts.open(make_sequence(2, num_emitted=3), "gw", 0.0)
    add_tokens(attempt, 10)
    attempts.finish(attempt, "length", None)
    attempts.publish([attempt])
    batch, finished = sent[0][1], sent[1][1]
    assert isinstance(batch, TokenBatch)
    assert isinstance(finished, Finished)
    assert batch.items[0].index == 3
    assert finished.num_output_tokens == 4


def test_finished_tokens_can_be_asked_for_again_for_a_while(attempts: Attempts, sent: Sent) -> None:
    attempt = attempts.open(make_sequence(), "gw", 0.0)
    add_tokens(attempt, 10, 11, 12)
    attempts.finish(attempt, "stop", 12)
    attempts.publish([attempt])
    attempts.end(attempt, 1.0, keeps_tokens=True)
    sent.clear()
    wish = ResendTokens(**attempt.key._asdict(), gateway_id="gw", from_index=1)
    attempts.resend(wish)
    batch, finished = sent[0][1], sent[1][1]
    assert isinstance(batch, TokenBatch)
    assert isinstance(finished, Finished)
    assert (batch.items[0].index, batch.items[0].token_ids) == (1, [11, 12])
    assert [item.state for item in attempts.roster("gw").items] == ["finished"]
    attempts.prune(4.1)
    sent.clear()
    attempts.resend(wish)
    assert sent == []
    assert attempts.roster("gw").items == []


def test_a_failed_attempt_is_in_no_roster(attempts: Attempts, sent: Sent) -> None:
    attempt = attempts.open(make_sequence(), "gw", 0.0)
    attempts.fail(attempt.key, "gw", "no_capacity", retryable=True)
    attempts.end(attempt, 1.0, keeps_tokens=False)
    assert attempts.roster("gw").items == []
    failed = sent[0][1]
    assert isinstance(failed, Failed)
    assert (failed.reason, failed.retryable) == ("no_capacity", True)


def test_a_roster_tells_every_gateway_only_of_its_own(attempts: Attempts) -> None:
    attempt = attempts.open(make_sequence(), "gw1", 0.0)
    add_tokens(attempt, 1, 2)
    assert attempts.roster("gw2").items == []
    item = attempts.roster("gw1").items[0]
    assert (item.key, item.state, item.next_index) == (attempt.key, "waiting", 2)


def test_tokens_wait_while_a_gateways_stream_is_full_and_go_out_in_one_piece(
    attempts: Attempts, sender: Recorder, sent: Sent
) -> None:
    sender.full.add("gw")
    attempt = attempts.open(make_sequence(), "gw", 0.0)
    for token_id in (10, 11):
        add_tokens(attempt, token_id)
        attempts.publish([attempt])
    attempts.finish(attempt, "length", None)
    attempts.end(attempt, 1.0, keeps_tokens=True)
    attempts.publish_held_back()
    assert sent == []
    sender.full.clear()
    attempts.publish_held_back()
    attempts.publish_held_back()
    assert [type(message) for _, message in sent] == [TokenBatch, Finished]
    batch = sent[0][1]
    assert isinstance(batch, TokenBatch)
    assert batch.items[0].token_ids == [10, 11]


# --- log-probabilities of prompts


def scores(first: int, count: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(logprob=-float(n), top_token_ids=[], top_logprobs=[]) for n in range(first, first + count)]


def pieces(sent: Sent) -> list[tuple[int, list[float]]]:
    """(index, log-probabilities) of each message, which is taken."""
    found = [(m.index, [e.logprob for e in m.logprobs]) for _, m in sent if isinstance(m, PromptLogprobs)]
    sent.clear()
    return found


def test_a_prompts_log_probabilities_go_out_once_in_pieces_and_before_tokens(attempts: Attempts, sent: Sent) -> None:
    attempt = attempts.open(make_sequence(), "gw", 0.0)
    first = StepOutput(prompt_logprobs=[(attempt.sequence, scores(1, PROMPT_LOGPROBS_PER_MESSAGE + 2))])
    attempts.publish(attempts.absorb(first))
    assert [(index, len(values)) for index, values in pieces(sent)] == [
        (1, PROMPT_LOGPROBS_PER_MESSAGE),
        (1 + PROMPT_LOGPROBS_PER_MESSAGE, 2),
    ]
    last = StepOutput(prompt_logprobs=[(attempt.sequence, scores(900, 1))], tokens=[(attempt.sequence, 7, None)])
    attempts.publish(attempts.absorb(last))
    assert [type(message) for _, message in sent] == [PromptLogprobs, TokenBatch]
    assert pieces(sent) == [(3 + PROMPT_LOGPROBS_PER_MESSAGE, [-900.0])]


def test_what_a_full_stream_held_back_goes_out_later(attempts: Attempts, sender: Recorder, sent: Sent) -> None:
    attempt = attempts.open(make_sequence(), "gw", 0.0)
    sender.full.add("gw")
    attempts.publish(attempts.absorb(StepOutput(prompt_logprobs=[(attempt.sequence, scores(1, 3))])))
    assert sent == []
    assert attempt.has_unsent
    sender.full.clear()
    attempts.publish_held_back()
    assert pieces(sent) == [(1, [-1.0, -2.0, -3.0])]
    assert not attempt.has_unsent


@pytest.mark.parametrize(("start", "expected"), [(1, [-1.0, -2.0, -3.0]), (3, [-3.0]), (4, None), (None, None)])
def test_log_probabilities_can_be_asked_for_again_even_after_the_end(
    attempts: Attempts, sent: Sent, start: int | None, expected: list[float] | None
) -> None:
    attempt = attempts.open(make_sequence(), "gw", 0.0)
    attempts.publish(attempts.absorb(StepOutput(prompt_logprobs=[(attempt.sequence, scores(1, 3))])))
    add_tokens(attempt, 7)
    attempts.finish(attempt, "length", None)
    attempts.publish([attempt])
    attempts.end(attempt, 1.0, keeps_tokens=True)
    sent.clear()
    attempts.resend(ResendTokens(**attempt.key._asdict(), gateway_id="gw", from_index=0, from_prompt_index=start))
    kinds = [TokenBatch, Finished] if expected is None else [PromptLogprobs, TokenBatch, Finished]
    assert [type(message) for _, message in sent] == kinds
    assert pieces(sent) == ([] if expected is None else [(start, expected)])
