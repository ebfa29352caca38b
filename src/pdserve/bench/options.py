"""The command line of `pdserve bench`, checked once. Never sends anything."""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pdserve.arguments import CommandParser
from pdserve.bench.summary import Slos
from pdserve.bench.traces import Trace, read_trace
from pdserve.errors import SettingError

_EPILOG = """examples:
  pdserve bench --concurrency 8 --input-tokens 256 --output-tokens 64
  pdserve bench --rate 2 --num-requests 200 --ttft-slo 0.5 --tpot-slo 0.05 --json result.json
  pdserve bench --url http://host:8000 --trace trace.csv.gz --max-requests 500 --speed 2
"""


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Lengths drawn uniformly from `low`..`high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, name: str, text: str) -> TokenRange:
        """Read `128` or `64-256`.

        Raises:
            SettingError: names the flag `name` and what was expected.
        """
        low, _, high = text.partition("-")
        try:
            result = cls(int(low), int(high or low))
        except ValueError:
            raise SettingError(name, text, "a number of tokens, or a range such as 64-256") from None
        if not 1 <= result.low <= result.high:
            raise SettingError(name, text, "an ascending range of at least one token")
        return result

    def draw(self, source: random.Random) -> int:
        """One length in tokens, drawn from `source`."""
        return source.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Everything that defines a benchmark, so that the recorded options repeat it."""

    url: str | None
    service: str | None
    model: str | None
    endpoint: str
    concurrency: int | None
    rate_per_s: float | None
    trace_path: Path | None
    trace_unit: str
    speed: float
    max_requests: int | None
    num_requests: int
    input_tokens: TokenRange
    output_tokens: TokenRange
    max_input_tokens: int | None
    max_output_tokens: int | None
    does_ignore_eos: bool
    does_ask_token_ids: bool
    temperature: float
    num_warmup: int
    num_runs: int
    seed: int
    slos: Slos
    timeout_s: float
    extra_body: dict[str, Any]
    json_path: Path | None
    dtype: str | None
    note: str

    @property
    def pattern(self) -> str:
        """The load pattern in a few words."""
        if self.trace_path is not None:
            return f"trace {self.trace_path.name} at {self.speed:g}x speed"
        return f"Poisson {self.rate_per_s:g}/s" if self.rate_per_s else f"concurrency {self.concurrency}"

    def read_trace(self) -> Trace | None:
        """The trace to replay, if any."""
        if self.trace_path is None:
            return None
        return read_trace(self.trace_path, unit=self.trace_unit, seed=self.seed)

    def as_dict(self) -> dict[str, Any]:
        """The options as the report has them: file names only, never folders of the machine."""
        values = asdict(self)
        values["trace_path"] = self.trace_path.name if self.trace_path else None
        del values["json_path"]
        return values


def parse_options(argv: list[str]) -> BenchOptions:
    """Read the command line; argparse exits with 2 on unknown or malformed flags.

    Raises:
        SettingError: a value is out of range.
    """
    args = _parser().parse_args(argv)
    is_open = args.rate is not None or args.trace is not None
    concurrency = 8 if args.concurrency is None and not is_open else args.concurrency
    options = BenchOptions(
        url=args.url,
        service=args.service,
        model=args.model,
        endpoint=args.endpoint,
        concurrency=concurrency,
        rate_per_s=args.rate,
        trace_path=args.trace,
        trace_unit=args.trace_unit,
        speed=args.speed,
        max_requests=args.max_requests,
        num_requests=8 * (concurrency or 8) if args.num_requests is None else args.num_requests,
        input_tokens=TokenRange.parse("--input-tokens", args.input_tokens),
        output_tokens=TokenRange.parse("--output-tokens", args.output_tokens),
        max_input_tokens=args.max_input_tokens,
        max_output_tokens=args.max_output_tokens,
        does_ignore_eos=not args.no_ignore_eos,
        does_ask_token_ids=not args.no_token_ids,
        temperature=args.temperature,
        num_warmup=args.warmup if args.warmup is not None else (concurrency or 4),
        num_runs=args.runs,
        seed=random.SystemRandom().getrandbits(31) if args.seed is None else args.seed,
        slos=Slos(args.ttft_slo, args.tpot_slo),
        timeout_s=args.timeout_s,
        extra_body=_json_object("--extra-body", args.extra_body),
        json_path=args.json,
        dtype=args.dtype,
        note=args.note,
    )
    _check(options)
    return options


def _check(options: BenchOptions) -> None:
    at_least = (
        ("--concurrency", options.concurrency, 1),
        ("--runs", options.num_runs, 1),
        ("--warmup", options.num_warmup, 0),
        ("--num-requests", options.num_requests, 1),
        ("--max-requests", options.max_requests, 1),
        ("--max-input-tokens", options.max_input_tokens, 1),
        ("--max-output-tokens", options.max_output_tokens, 1),
    )
    for name, value, low in at_least:
        if value is not None and value < low:
            raise SettingError(name, value, f"at least {low}")
    above_zero = (
        ("--rate", options.rate_per_s),
        ("--speed", options.speed),
        ("--timeout-s", options.timeout_s),
        ("--ttft-slo", options.slos.ttft_s),
        ("--tpot-slo", options.slos.tpot_s),
    )
    for name, number in above_zero:
        if number is not None and not number > 0:
            raise SettingError(name, number, "a number above 0")


def _json_object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise SettingError(name, text, "a JSON object")
    return value


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="pdserve bench",
        description="Load test of any OpenAI-compatible server. The API key is read from OPENAI_API_KEY.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--url", help="where the server answers, with or without http:// and /v1 (default: the running local service)")
    add("--service", help="name of the local service, where several run here")
    add("--model", help="default: the first that the server lists")
    add("--endpoint", choices=("completions", "chat"), default="completions", help="default: completions")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--concurrency", type=int, help="closed loop: requests always in flight (default: 8)")
    load.add_argument("--rate", type=float, metavar="PER_S", help="open loop: Poisson arrivals")
    load.add_argument("--trace", type=Path, metavar="FILE", help="open loop: replay a csv[.gz|.xz] or jsonl[.gz|.xz]")
    add(
        "--trace-unit",
        choices=("auto", "s", "ms", "us", "ns"),
        default="auto",
        help="unit of numeric arrivals (default: auto)",
    )
    add("--speed", type=float, default=1.0, help="replay a trace this many times faster")
    add("--max-requests", type=int, help="replay only the first so many requests of a trace")
    add("--num-requests", type=int, help="requests of each run (default: 8 x concurrency)")
    add("--input-tokens", default="128", metavar="N|LOW-HIGH", help="prompt length (default: 128)")
    add("--output-tokens", default="64", metavar="N|LOW-HIGH", help="answer length (default: 64)")
    add("--max-input-tokens", type=int, help="cut a trace's longer prompts")
    add("--max-output-tokens", type=int, help="cut a trace's longer answers")
    add("--no-ignore-eos", action="store_true", help="let the model end an answer early")
    add("--no-token-ids", action="store_true", help="do not ask for token ids (strict servers); ITL is then per event")
    add("--temperature", type=float, default=0.0, help="sampling temperature (default: 0, greedy)")
    add("--warmup", type=int, help="requests before the first run, not measured (default: the concurrency)")
    add("--runs", type=int, default=3, help="medians over so many runs (default: 3)")
    add("--seed", type=int, help="the same seed sends the same prompts at the same times (default: drawn)")
    add("--ttft-slo", type=float, metavar="S", help="goodput: time to first token at most, in seconds")
    add("--tpot-slo", type=float, metavar="S", help="goodput: time per output token at most, in seconds")
    add("--timeout-s", type=float, default=600.0, help="a request without a complete answer by then has failed")
    add("--extra-body", default="{}", metavar="JSON", help="more fields for every request")
    add("--json", type=Path, metavar="FILE", help="write everything needed to repeat and recompute the result")
    add("--dtype", help="number format of the model, for the report, where the server does not tell")
    add("--note", default="", help="any text that the report shall carry")
    return parser
