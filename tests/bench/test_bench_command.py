from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest

from pdserve.bench.options import parse_options
from pdserve.commands.bench import main
from pdserve.errors import SettingError


@pytest.fixture
def server(fake_server, tokens):
    return fake_server(lambda path, body: tokens([0.005] * body["max_tokens"], [[1]] * body["max_tokens"]))


def test_a_closed_loop_prints_a_table_and_writes_everything_needed_to_repeat_it(
    server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    argv = ["--url", server.url, "--concurrency", "2", "--num-requests", "6", "--runs", "2", "--output-tokens", "4"]
    argv += ["--input-tokens", "10-20", "--ttft-slo", "5", "--tpot-slo", "5", "--seed", "3", "--json", str(file)]
    assert main(argv) == 0
    printed = capsys.readouterr().out
    for word in ("TTFT", "TPOT", "ITL", "hand-off gap", "E2E", "output tok/s", "goodput        100.0%"):
        assert word in printed
    result = json.loads(file.read_text())
    assert (result["model"], result["dtype"], result["parameters"]["seed"]) == ("fake", "float32", 3)
    assert result["machine"]["cpu"]
    assert result["versions"]["pdserve"]
    assert str(tmp_path) not in file.read_text()
    assert [len(run["requests"]) for run in result["runs"]] == [6, 6]
    assert result["median"]["output_tokens"] == 2 * 6 * 4
    assert result["median"]["latencies_s"]["tpot"]["p99"] > 0.004
    sent = [body["prompt"] for body in server.bodies]
    assert len(sent) == 1 + 2 + 12, "one probe, the warm-up, two runs"
    assert all(10 <= len(prompt) <= 20 for prompt in sent)
    assert len({prompt[0] for prompt in sent}) == len(sent), "no two prompts share even their first token"


def test_a_trace_is_replayed_with_its_lengths(server, tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0,5,3\n0.2,6,2\n0.4,700,1\n")
    file = tmp_path / "r.json"
    argv = ["--url", server.url, "--trace", str(trace), "--speed", "2", "--runs", "1", "--warmup", "0"]
    assert main([*argv, "--max-input-tokens", "50", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    requests = result["runs"][0]["requests"]
    assert [r["num_output_tokens"] for r in requests] == [3, 2, 1]
    assert [r["scheduled_s"] for r in requests] == pytest.approx([0, 0.1, 0.2], abs=0.05)
    assert [len(b["prompt"]) for b in server.bodies[-3:]] == [5, 6, 50]
    assert result["trace"]["columns"] == ["arrival_s", "input_tokens", "output_tokens"]


def test_after_its_runs_the_collector_looks_at_all_objects_again(server) -> None:
    frozen = gc.get_freeze_count()
    argv = ["--url", server.url, "--num-requests", "2", "--runs", "2", "--warmup", "0", "--output-tokens", "2"]
    assert main(argv) == 0
    assert gc.get_freeze_count() == frozen, "what stays frozen is never freed, not even at the end of the process"


def test_failures_are_counted_and_shown(fake_server, tokens, capsys: pytest.CaptureFixture[str]) -> None:
    answers = iter([tokens([0.0], [[1]])] + [tokens([0.0], [[1]]), (500, {"error": {"message": "broken"}})] * 2)
    server = fake_server(lambda path, body: next(answers))
    argv = ["--url", server.url, "--concurrency", "1", "--num-requests", "4", "--runs", "1", "--warmup", "0"]
    assert main([*argv, "--ttft-slo", "9"]) == 0
    printed = capsys.readouterr().out
    assert "4 sent, 2 failed" in printed
    assert "goodput        50.0% of all sent" in printed
    assert "broken" in printed


def test_a_server_that_refuses_token_ids_is_measured_by_events(
    fake_server, tokens, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(path: str, body: dict) -> object:
        if "return_token_ids" in body:
            return 400, {"error": {"message": "unknown field return_token_ids"}}
        return tokens([0.0, 0.0], [[1], [2]], ids=False)

    server = fake_server(script)
    assert main(["--url", server.url, "--concurrency", "1", "--num-requests", "2", "--runs", "1"]) == 0
    assert "between events" in capsys.readouterr().out


def test_chat_prompts_have_the_wanted_length_by_the_servers_count(fake_server, tokens) -> None:
    server = fake_server(lambda path, body: tokens([0.0], [[1]]))
    argv = ["--url", server.url, "--endpoint", "chat", "--concurrency", "1", "--num-requests", "3", "--runs", "1"]
    assert main([*argv, "--input-tokens", "50", "--output-tokens", "1"]) == 0
    assert {len(body["messages"][0]["content"]) for body in server.bodies} == {50}


def test_no_server_is_one_clear_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://127.0.0.1:9"]) == 1
    message = capsys.readouterr().err
    assert "no server answers at http://127.0.0.1:9" in message
    assert "pdserve up" in message


def test_a_server_that_fails_the_first_request_is_one_clear_sentence(
    fake_server, capsys: pytest.CaptureFixture[str]
) -> None:
    server = fake_server(lambda path, body: (503, {"error": {"message": "no pair is ready"}}))
    assert main(["--url", server.url]) == 1
    assert "no pair is ready" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["--concurrency", "0"], "--concurrency"),
        (["--rate", "-1"], "--rate"),
        (["--rate", "nan"], "--rate"),
        (["--input-tokens", "9-3"], "--input-tokens"),
        (["--output-tokens", "many"], "--output-tokens"),
        (["--runs", "0"], "--runs"),
        (["--ttft-slo", "0"], "--ttft-slo"),
        (["--extra-body", "[1]"], "--extra-body"),
    ],
)
def test_a_bad_flag_is_named(argv: list[str], name: str) -> None:
    with pytest.raises(SettingError, match=name):
        parse_options(argv)


def test_a_result_that_cannot_be_written_is_printed_all_the_same(
    server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--url", server.url, "--concurrency", "1", "--num-requests", "2", "--runs", "1", "--warmup", "0"]
    assert main([*argv, "--json", str(tmp_path / "no" / "such" / "folder.json")]) == 1
    told = capsys.readouterr()
    assert "TTFT" in told.out
    assert "cannot be written" in told.err


def test_a_model_that_is_not_served_is_named_with_those_that_are(server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", server.url, "--model", "nope"]) == 1
    assert f"the server at {server.url} serves fake, not 'nope'" in capsys.readouterr().err


def test_a_url_may_end_with_v1(server, tmp_path: Path) -> None:
    argv = ["--concurrency", "1", "--num-requests", "1", "--runs", "1", "--warmup", "0"]
    assert main(["--url", f"{server.url.removeprefix('http://')}/v1/", *argv]) == 0
