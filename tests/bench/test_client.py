from __future__ import annotations

import asyncio
import itertools
import statistics
import time

import pytest

from pdserve.bench.client import Target, send
from pdserve.bench.connection import Address, ConnectionPool
from pdserve.bench.load import poisson_arrivals, run_closed, run_open
from pdserve.bench.prompts import Prompt
from pdserve.errors import SettingError

TARGET = Target(model="fake", endpoint="completions", timeout_s=10)
PROMPT = Prompt([1, 2, 3], "hello", 3, 5)


async def sent(url: str, target: Target = TARGET):
    pool = ConnectionPool(url, {})
    try:
        return await send(pool, target, PROMPT)
    finally:
        await pool.close()


async def test_measured_times_are_right_within_milliseconds(fake_server, tokens) -> None:
    delays = [0.15, 0.02, 0.04, 0.03, 0.08]
    server = fake_server(lambda path, body: tokens(delays, [[1], [2], [3], [4, 5], [6]]))
    lateness: list[float] = []
    for _ in range(5):
        record = await sent(server.url)
        assert record.is_ok, record.error
        assert [a.num_tokens for a in record.arrivals] == [1, 1, 1, 2, 1]
        lateness += [a.at_s - w for a, w in zip(record.arrivals, server.writes_s[-1], strict=False)]
        assert record.ttft_s >= 0.15
        assert [gap >= d - 0.01 for gap, d in zip(record.itl_s, [0.02, 0.04, 0.03, 0.0, 0.08], strict=True)] == [
            True
        ] * 5
    assert min(lateness) > 0, "nothing arrives before it was written"
    assert statistics.median(lateness) < 0.003


async def test_what_the_server_tells_is_recorded(fake_server, tokens) -> None:
    server = fake_server(lambda path, body: tokens([0.0] * 3, [[1], [2, 3], [4]]))
    record = await sent(server.url)
    assert (record.num_prompt_tokens, record.num_cached_tokens, record.num_output_tokens) == (7, 3, 4)
    assert record.finish_reason == "length"
    assert record.has_token_times


async def test_the_body_asks_for_what_a_benchmark_needs(fake_server, tokens) -> None:
    server = fake_server(lambda path, body: tokens([0.0], [[1]]))
    await sent(server.url)
    assert server.bodies[0] == {
        "model": "fake",
        "prompt": [1, 2, 3],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "max_tokens": 5,
        "ignore_eos": True,
        "return_token_ids": True,
    }


async def test_a_chat_sends_text_and_the_role_chunk_is_no_token(fake_server, event) -> None:
    def chunk(delta: dict, **more: object) -> dict:
        return {"choices": [{"index": 0, "delta": delta, **more}]}

    events = [
        event(0.0, chunk({"role": "assistant", "content": ""})),
        event(0.1, chunk({"content": "Hi"})),
        event(0.0, chunk({"content": " you"}, finish_reason="stop")),
        event(0.0, {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}}),
        event(0.0, "data: [DONE]\n\n"),
    ]
    server = fake_server(lambda path, body: events)
    record = await sent(server.url, Target("fake", "chat", 10))
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "hello"}]
    assert server.bodies[0]["max_completion_tokens"] == 5
    assert record.ttft_s >= 0.1
    assert (len(record.arrivals), record.num_output_tokens, record.has_token_times) == (2, 3, False)


async def test_a_token_without_text_is_a_token(fake_server, event) -> None:
    half_a_character = {"choices": [{"index": 0, "text": "", "token_ids": [9]}]}
    server = fake_server(
        lambda path, body: [event(0, half_a_character), event(0.05, half_a_character), event(0, "data: [DONE]\n\n")]
    )
    record = await sent(server.url)
    assert record.is_ok, record.error
    assert record.num_output_tokens == 2
    assert record.itl_s[0] >= 0.04


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("status", "HTTP 503: "),
        ("error event", "error event: "),
        ("closed", "ConnectionLostError"),
        ("no done", "without [DONE]"),
        ("garbage", "unreadable event"),
        ("uncountable", "cannot be counted"),
        ("nothing", "cannot be counted"),
    ],
)
async def test_whatever_is_no_complete_answer_is_a_failure_with_a_reason(
    fake_server, tokens, event, answer: str, words: str
) -> None:
    one = {"choices": [{"index": 0, "text": "x", "token_ids": [1]}]}
    done = event(0, "data: [DONE]\n\n")
    answers = {
        "status": (503, {"error": {"message": "no pair"}}),
        "error event": [event(0, one), event(0, {"error": {"message": "worker lost"}})],
        "closed": [event(0, one), event(0, "CLOSE")],
        "no done": [event(0, one)],
        "garbage": [event(0, "data: {nope\n\n"), done],
        "uncountable": [event(0, {"choices": [{"index": 0, "text": "x"}]}), done],
        "nothing": [done],
    }
    server = fake_server(lambda path, body: answers[answer])
    record = await sent(server.url)
    assert not record.is_ok
    assert words in (record.error or "")


async def test_a_silent_server_is_a_failure_after_the_timeout_and_the_connection_is_closed(fake_server, event) -> None:
    server = fake_server(lambda path, body: [event(0.6, ": late\n\n"), event(0.0, ": later\n\n")])
    record = await sent(server.url, Target("fake", "completions", timeout_s=0.1))
    assert record.error == "no complete answer within 0.1 s"
    give_up_s = time.monotonic() + 5
    while not server.num_disconnects_in_stream:
        assert time.monotonic() < give_up_s
        await asyncio.sleep(0.01)


async def test_no_server_is_a_failure() -> None:
    record = await sent("http://127.0.0.1:9")
    assert "Connection" in (record.error or "")


async def test_connections_are_kept_and_replaced_when_the_server_closed_them(fake_server, tokens, event) -> None:
    kinds = iter(["keep", "keep", "close", "keep"])
    script = {"keep": tokens([0.0], [[1]]), "close": [*tokens([0.0], [[1]])[:-1], event(0, "CLOSE")]}
    server = fake_server(lambda path, body: script[next(kinds)])
    pool = ConnectionPool(server.url, {})
    results = [(await send(pool, TARGET, PROMPT)).is_ok for _ in range(4)]
    await pool.close()
    assert results == [True, True, False, True]
    assert server.num_connections == 2


async def test_64_streams_cost_the_client_little_and_are_not_delayed_by_it(fake_server, tokens) -> None:
    num_streams, num_tokens = 64, 20
    server = fake_server(lambda path, body: tokens([0.05] * num_tokens, [[i] for i in range(num_tokens)]))
    pool = ConnectionPool(server.url, {})
    prompts = [PROMPT] * num_streams
    start_s = time.thread_time()
    records = await run_closed(lambda prompt, due: send(pool, TARGET, prompt, due), prompts, num_streams)
    cpu_s = time.thread_time() - start_s
    await pool.close()
    assert all(record.is_ok for record in records)
    assert len(records) == num_streams
    assert cpu_s / (num_streams * num_tokens) < 250e-6, "client CPU per event; 0.02-0.06 ms when measured"


async def test_a_closed_loop_keeps_exactly_its_concurrency_in_flight(fake_server, tokens) -> None:
    in_flight, peak = 0, 0

    async def sender(prompt: Prompt, due_s: float) -> object:
        nonlocal in_flight, peak
        in_flight += 1
        peak = max(peak, in_flight)
        await asyncio.sleep(0.005)
        in_flight -= 1
        return prompt

    results = await run_closed(sender, [PROMPT] * 20, 4)
    assert (len(results), peak) == (20, 4)


async def test_an_open_loop_sends_when_due_although_nothing_is_answered() -> None:
    due, sent_at, release = [], [], asyncio.Event()

    async def sender(prompt: Prompt, due_s: float) -> object:
        due.append(due_s)
        sent_at.append(time.perf_counter())
        if len(sent_at) == 5:
            release.set()
        await release.wait()
        return prompt

    results = await run_open(sender, [PROMPT] * 5, [0.0, 0.01, 0.02, 0.05, 0.05])
    assert len(results) == 5
    assert all(s >= d for s, d in zip(sent_at, due, strict=True))
    assert due[3] - due[0] == pytest.approx(0.05)


def test_poisson_gaps_have_the_mean_and_spread_of_an_exponential() -> None:
    arrivals = poisson_arrivals(4.0, 20000, seed=7)
    gaps = [b - a for a, b in itertools.pairwise(arrivals)]
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.05)
    assert arrivals == poisson_arrivals(4.0, 20000, seed=7)


def test_urls_are_read() -> None:
    assert Address.of("https://a.example/x/") == Address("a.example", 443, True, "/x")
    assert Address.of("127.0.0.1:81") == Address("127.0.0.1", 81, False, "")
    with pytest.raises(SettingError, match="--url"):
        Address.of("ftp://a")
