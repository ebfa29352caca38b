"""Every message survives msgpack and JSON; what cannot be read is a BusError, never a wrong message."""

from __future__ import annotations

import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import BusError
from pdserve.messages import (
    SCHEMA_VERSION,
    AnyMessage,
    Cancel,
    DecodeJob,
    Failed,
    Finished,
    KvFailed,
    KvReady,
    KvRelease,
    KvWant,
    LeaseItem,
    LeaseRenewal,
    Message,
    PrefillJob,
    PromptLogprobs,
    ResendTokens,
    Roster,
    RosterItem,
    SequenceTokens,
    Started,
    Timing,
    TokenBatch,
    TokenLogprobs,
    decode,
    encode,
)
from pdserve.reasons import SequenceState
from pdserve.sampling_params import SamplingParams

ATTEMPT: dict[str, Any] = {"request_id": "req-1", "choice": 1, "attempt": 2, "nonce": "n0nce"}
PROCESS: dict[str, Any] = {"worker_id": "d1", "generation": "g7"}
LOGPROBS = TokenLogprobs(logprob=-0.5, top_token_ids=[5, 6], top_logprobs=[-0.5, -1.5])
JOB: dict[str, Any] = {
    "gateway_id": "gw",
    "fingerprint": "f",
    "prompt_token_ids": [1, 2, 3],
    "num_original_prompt_tokens": 2,
    "sampling": SamplingParams(seed=2**63 - 1, max_tokens=9, logit_bias={7: -100.0}, stop_token_ids=(2,), logprobs=1),
    "remaining_s": 12.5,
    "priority": 3,
    "cache_salt": "tenant",
}
MESSAGES: list[Message] = [
    PrefillJob(**ATTEMPT, **JOB, will_decode=False),
    DecodeJob(**ATTEMPT, **JOB, prefill_worker_id="p1", prefill_generation="g1"),
    Cancel(**ATTEMPT, reason="deadline"),
    ResendTokens(**ATTEMPT, gateway_id="gw", from_index=4, from_prompt_index=3),
    KvWant(**ATTEMPT, **PROCESS, kv_signature="s", backend="tcp"),
    KvReady(
        **ATTEMPT, **PROCESS, first_block_index=2, block_ids=[9, 4], digests=[b"\x00" * 16, bytes(range(16))],
        chain_hash=b"\xff" * 16, is_last=True, token0=11, token0_logprobs=LOGPROBS,
    ),
    KvFailed(**ATTEMPT, **PROCESS, reason="expired", detail="d"),
    KvRelease(**ATTEMPT, **PROCESS, is_complete=False),
    LeaseRenewal(**PROCESS, items=[LeaseItem(**ATTEMPT, num_announced_blocks=3, has_token0=True)]),
    Started(**ATTEMPT, **PROCESS, num_cached_tokens=16, schedule_s=0.25),
    PromptLogprobs(**ATTEMPT, **PROCESS, index=1, logprobs=[LOGPROBS]),
    TokenBatch(
        **PROCESS,
        items=[
            SequenceTokens(
                **ATTEMPT, index=5, token_ids=[8], logprobs=[LOGPROBS],
                timing=Timing(schedule_s=0.1, prefill_s=0.2, transfer_s=0.3, transfer_bytes=4096),
            )
        ],
    ),
    Finished(**ATTEMPT, **PROCESS, finish_reason="stop", num_output_tokens=6, stop_token_id=2),
    Failed(**ATTEMPT, **PROCESS, reason="no_capacity", retryable=True, detail="d", was_in_step=True),
    Roster(**PROCESS, items=[RosterItem(**ATTEMPT, state="running", next_index=6)]),
]  # fmt: skip


def name_of(message: object) -> str:
    return type(message).__name__


def test_every_message_type_is_tried_here() -> None:
    assert {type(message) for message in MESSAGES} == set(typing.get_args(AnyMessage))


@pytest.mark.parametrize("message", MESSAGES, ids=name_of)
def test_a_message_survives_msgpack(message: Message) -> None:
    assert decode(encode([message])) == [message]


@pytest.mark.parametrize("message", MESSAGES, ids=name_of)
def test_a_message_survives_json(message: Message) -> None:
    assert msgspec.json.decode(msgspec.json.encode(message), type=AnyMessage) == message


def test_an_entry_keeps_the_order_of_its_messages() -> None:
    assert decode(encode(MESSAGES)) == MESSAGES
    assert decode(encode([])) == []


@pytest.mark.parametrize("message", MESSAGES, ids=name_of)
def test_fields_from_a_newer_sender_are_ignored(message: Message) -> None:
    (as_dict,) = msgspec.msgpack.decode(encode([message]))
    assert decode(msgspec.msgpack.encode([as_dict | {"new_field": {"a": [1]}}])) == [message]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("preempted", SequenceState.WAITING),  # a worker of version 0.1.0
        ("waiting", SequenceState.WAITING),
        ("running", SequenceState.RUNNING),
        ("Preempted", SequenceState.OTHER),
        ("paused", SequenceState.OTHER),
        ("", SequenceState.OTHER),
    ],
)
def test_a_roster_with_states_of_another_version_is_read(written: str, read: SequenceState) -> None:
    roster = Roster(**PROCESS, items=[RosterItem(**ATTEMPT, state="running", next_index=6)])
    (as_dict,) = msgspec.msgpack.decode(encode([roster]))
    (item,) = as_dict["items"]
    item[item.index("running")] = written
    (again,) = decode(msgspec.msgpack.encode([as_dict]))
    assert isinstance(again, Roster)
    assert again.items[0].state is read


@pytest.mark.parametrize("message", MESSAGES, ids=name_of)
def test_a_schema_version_from_the_future_is_refused(message: Message) -> None:
    newer = msgspec.structs.replace(message, version=SCHEMA_VERSION + 1)
    with pytest.raises(BusError, match=f"{name_of(message)} has schema version {SCHEMA_VERSION + 1}"):
        decode(encode([newer]))


@pytest.mark.parametrize("message", MESSAGES, ids=name_of)
def test_a_missing_required_field_is_refused(message: Message) -> None:
    (as_dict,) = msgspec.msgpack.decode(encode([message]))
    required = [field.encode_name for field in msgspec.structs.fields(message) if field.required]
    for name in required:
        with pytest.raises(BusError, match="unreadable"):
            decode(msgspec.msgpack.encode([{key: value for key, value in as_dict.items() if key != name}]))


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"text", b"\x80", msgspec.msgpack.encode([{"type": "Unknown"}])])
def test_what_is_no_list_of_messages_is_refused(payload: bytes) -> None:
    with pytest.raises(BusError, match="unreadable"):
        decode(payload)


def test_every_truncation_is_refused() -> None:
    payload = encode(MESSAGES)
    for length in range(len(payload)):
        with pytest.raises(BusError):
            decode(payload[:length])


@given(st.data())
def test_damaged_bytes_are_either_refused_or_a_well_formed_message(data: st.DataObject) -> None:
    payload = bytearray(encode([data.draw(st.sampled_from(MESSAGES))]))
    position = data.draw(st.integers(0, len(payload) - 1))
    payload[position] ^= data.draw(st.integers(1, 255))
    try:
        messages = decode(bytes(payload))
    except BusError:
        return
    assert all(isinstance(message, Message) for message in messages)


def test_one_steps_tokens_of_32_sequences_stay_below_5_kib() -> None:
    items = [
        SequenceTokens(request_id="r" * 20, choice=0, attempt=1, nonce="n" * 16, index=n, token_ids=[49000])
        for n in range(32)
    ]
    assert len(encode([TokenBatch(**PROCESS, items=items)])) < 5 * 1024
