"""docs/bus.md names every key, message and field, and no message that does not exist."""

from __future__ import annotations

import re
import typing
from pathlib import Path

import msgspec
import pytest

from pdserve.bus.keys import Keys
from pdserve.messages import (
    AnyMessage,
    LeaseItem,
    Message,
    RosterItem,
    SequenceTokens,
    Timing,
    TokenLogprobs,
)
from pdserve.registration import GatewayRegistration, WorkerLoad, WorkerRegistration
from pdserve.sampling_params import SamplingParams

PAGE = (Path(__file__).parents[2] / "docs" / "bus.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", PAGE, flags=re.MULTILINE | re.DOTALL))
ATTEMPT = {"request_id", "choice", "attempt", "nonce"}
STRUCTS: list[type[msgspec.Struct]] = [
    *typing.get_args(AnyMessage),
    LeaseItem, RosterItem, SequenceTokens, Timing, TokenLogprobs, SamplingParams,
    WorkerRegistration, WorkerLoad, GatewayRegistration,
]  # fmt: skip


def test_every_struct_on_the_bus_has_a_section_and_no_other_has() -> None:
    assert set(SECTIONS) == {struct.__name__ for struct in STRUCTS}


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_every_field_is_named_in_its_section(struct: type[msgspec.Struct]) -> None:
    section = SECTIONS[struct.__name__]
    fields = {field.encode_name for field in msgspec.structs.fields(struct)}
    if issubclass(struct, Message):
        fields -= {"version"}
    if "*attempt*" in section:
        assert fields >= ATTEMPT
        fields -= ATTEMPT
    named = set(re.findall(r"`(\w+)`", section))
    assert fields <= named, f"not named: {sorted(fields - named)}"


@pytest.mark.parametrize("struct", typing.get_args(AnyMessage), ids=lambda struct: struct.__name__)
def test_a_section_says_that_a_message_is_about_an_attempt_exactly_when_it_is(struct: type[msgspec.Struct]) -> None:
    is_about_attempt = {field.name for field in msgspec.structs.fields(struct)} >= ATTEMPT
    assert ("*attempt*" in SECTIONS[struct.__name__]) == is_about_attempt


def test_every_key_is_named() -> None:
    keys = Keys("<service>")
    for key in (
        keys.workers,
        keys.worker("<id>"),
        keys.gateways,
        keys.gateway("<id>"),
        keys.inbox("<worker id>", "<generation>"),
        keys.tokens("<gateway id>"),
    ):
        assert f"`{key.removeprefix(keys.prefix)}`" in PAGE
    assert f"`{keys.prefix}`" in PAGE
