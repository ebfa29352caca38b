"""What is verified: services to start, and passes over prompts. Pure.

Plain: the demo model, fp32, greedy, once cold and once with a warm prefix cache. Full: a tiny model over every
transport, cache state and concurrency, with seeded sampling, then the demo model over NIXL.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.arguments import CommandParser
from pdserve.errors import SettingError

_PLAIN_PROMPTS, _FULL_PROMPTS = 24, 200
_PLAIN_LONGEST, _FULL_LONGEST = 600, 1500
_OUTPUT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Pass:
    """All prompts of a stage, sent once."""

    concurrency: int
    is_warm: bool
    """Whether the prefix cache holds the prompts; a warm pass follows a cold one of the same salt."""
    salt: str

    def __str__(self) -> str:
        return f"{'warm' if self.is_warm else 'cold'} cache, concurrency {self.concurrency}"


@dataclass(frozen=True, slots=True)
class Stage:
    """One service, started for it, and the passes on it."""

    model: str
    executor: str
    transport: str
    num_prompts: int
    max_prompt_tokens: int
    max_tokens: int
    passes: tuple[Pass, ...]
    num_sampled: int = 0
    """Prompts for seeded sampling at different concurrency."""

    @property
    def num_chats(self) -> int:
        """How many of the prompts are sent as chats."""
        return max(1, self.num_prompts // 10)


def parse_stages(argv: list[str] | None) -> list[Stage]:
    """The stages that the command line asks for.

    Raises:
        SettingError: a value is out of range.
    """
    parser = CommandParser(
        prog="pdserve verify",
        description="Token-exact comparison of the disaggregated service with transformers' generate (fp32, greedy).",
    )
    parser.add_argument("--full", action="store_true", help="tiny model: all transports, cold and warm; then demo")
    parser.add_argument("--model", help="demo, tiny, a folder, …; with --full: this one instead of tiny and demo")
    parser.add_argument("--executor", default="auto", help="as the setting EXECUTOR")
    parser.add_argument("--transport", choices=("auto", "nixl", "tcp"), help="verify over this transport only")
    parser.add_argument(
        "--prompts", type=int, metavar="N", help=f"number of prompts: default {_PLAIN_PROMPTS}, full {_FULL_PROMPTS}"
    )
    args = parser.parse_args(argv)
    if args.prompts is not None and args.prompts < 1:
        raise SettingError("--prompts", args.prompts, "at least 1")
    if args.full:
        return _full(args.model, args.executor, args.transport, args.prompts or _FULL_PROMPTS)
    return [_plain(args.model or "demo", args.executor, args.transport or "auto", args.prompts or _PLAIN_PROMPTS)]


def _plain(model: str, executor: str, transport: str, num_prompts: int) -> Stage:
    passes = (Pass(8, False, "a"), Pass(1, True, "a"))
    return Stage(model, executor, transport, num_prompts, _PLAIN_LONGEST, _OUTPUT_TOKENS, passes, num_sampled=4)


def _full(model: str | None, executor: str, transport: str | None, num_prompts: int) -> list[Stage]:
    passes = tuple(
        Pass(concurrency, is_warm, f"c{concurrency}") for concurrency in (1, 16) for is_warm in (False, True)
    )
    transports = (transport,) if transport else ("nixl", "tcp")
    stages = [
        Stage(model or "tiny", executor, t, num_prompts, _FULL_LONGEST, _OUTPUT_TOKENS, passes, num_sampled=32)
        for t in transports
    ]
    if model is None:
        demo = Stage("demo", executor, transport or "nixl", num_prompts, _FULL_LONGEST, _OUTPUT_TOKENS, passes[2:3])
        stages.append(demo)
    return stages
