"""Stop strings end a text at the same place however it is cut, and hold back no more than they must."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.gateway.text.stop_strings import StopMatcher


def run(matcher: StopMatcher, chunks: list[str]) -> str:
    shown = ""
    for chunk in chunks:
        shown += matcher.push(chunk)
        if matcher.is_matched:
            return shown
    return shown + matcher.finish()


def slow_truth(text: str, stops: list[str], is_included: bool) -> tuple[str, bool]:
    """Character by character: the first position at which the text ends with a stop string."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return text[:end] if is_included else text[: end - len(longest)], True
    return text, False


def cut(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *[place % (len(text) + 1) for place in cuts]})
    return [text[start:end] for start, end in itertools.pairwise(edges)]


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 100), max_size=10),
    is_included=st.booleans(),
)
def test_the_result_is_that_of_reading_character_by_character(
    text: str, stops: list[str], cuts: list[int], is_included: bool
) -> None:
    matcher = StopMatcher(tuple(stops), is_included)
    assert (run(matcher, cut(text, cuts)), matcher.is_matched) == slow_truth(text, stops, is_included)


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=4),
)
def test_only_a_suffix_that_may_become_a_stop_string_is_held(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(tuple(stops))
    shown = ""
    for end in range(1, len(text) + 1):
        shown += matcher.push(text[end - 1])
        if matcher.is_matched:
            break
        held = text[len(shown) : end]
        suffixes = [text[start:end] for start in range(end + 1)]
        assert held == next(s for s in suffixes if not s or any(stop.startswith(s) and stop != s for stop in stops))


def test_a_long_stop_string_that_never_begins_delays_nothing() -> None:
    matcher = StopMatcher(("#" * 40,))
    assert [matcher.push(word) for word in ("hello ", "world ", "again")] == ["hello ", "world ", "again"]


@pytest.mark.parametrize(("is_included", "expected"), [(False, "The quick br"), (True, "The quick brown fox")])
def test_a_stop_string_over_several_pieces(is_included: bool, expected: str) -> None:
    matcher = StopMatcher(("own fox",), is_included)
    assert run(matcher, ["The quick br", "ow", "n f", "ox", " jumps"]) == expected
    assert matcher.push("more") == ""


def test_without_stop_strings_everything_passes() -> None:
    assert run(StopMatcher(()), ["a", "b"]) == "ab"


def test_what_was_held_comes_out_at_the_end() -> None:
    assert run(StopMatcher(("abc",)), ["xab"]) == "xab"
