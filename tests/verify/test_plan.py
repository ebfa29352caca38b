from __future__ import annotations

import pytest

from pdserve.errors import SettingError
from pdserve.verify.plan import parse_stages


def test_plain_is_the_demo_model_cold_and_warm() -> None:
    (stage,) = parse_stages([])
    assert (stage.model, stage.transport) == ("demo", "auto")
    assert {one.is_warm for one in stage.passes} == {False, True}


def test_full_is_every_transport_cache_state_and_concurrency_then_the_demo_model() -> None:
    stages = parse_stages(["--full"])
    assert [(s.model, s.transport, s.num_prompts) for s in stages] == [
        ("tiny", "nixl", 200),
        ("tiny", "tcp", 200),
        ("demo", "nixl", 200),
    ]
    for stage in stages[:2]:
        assert {(one.concurrency, one.is_warm) for one in stage.passes} == {(c, w) for c in (1, 16) for w in (0, 1)}
        assert stage.max_prompt_tokens == 1500
        assert stage.num_sampled
    assert len(stages[2].passes) == 1
    assert not stages[2].passes[0].is_warm


def test_a_warm_pass_always_follows_a_cold_one_of_its_salt() -> None:
    for stage in parse_stages(["--full"]) + parse_stages([]):
        seen = set()
        for one in stage.passes:
            assert one.is_warm == (one.salt in seen)
            seen.add(one.salt)


def test_choices_narrow_what_is_verified() -> None:
    stages = parse_stages(["--full", "--model", "tiny", "--transport", "tcp", "--executor", "cpu", "--prompts", "9"])
    assert [(s.model, s.transport, s.executor, s.num_prompts) for s in stages] == [("tiny", "tcp", "cpu", 9)]
    with pytest.raises(SettingError, match="--prompts"):
        parse_stages(["--prompts", "0"])
