"""The `pdserve` command: a table of subcommands. Imports nothing of a subcommand before it is the one that runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

from pdserve import __version__
from pdserve.arguments import perhaps
from pdserve.errors import PdserveError


class Command(NamedTuple):
    """Where a subcommand lives (`module:function`, taking the remaining arguments) and what it does."""

    target: str
    summary: str


COMMANDS: dict[str, Command] = {
    "up": Command("pdserve.commands.up:main", "everything on this machine: bus, gateway, prefill and decode workers"),
    "status": Command("pdserve.commands.status:main", "the processes of the services that run here"),
    "chat": Command("pdserve.commands.chat:main", "talk to a running service in the terminal"),
    "bench": Command("pdserve.commands.bench:main", "load test of an OpenAI-compatible URL"),
    "verify": Command("pdserve.commands.verify:main", "compare served tokens with a reference, one by one"),
    "doctor": Command("pdserve.commands.doctor:main", "what works on this machine, and what will be used and why"),
    "config": Command("pdserve.commands.config:main", "every setting with value, default, unit and origin"),
    "make-model": Command("pdserve.commands.make_model:main", "write a tiny random model"),
    "bus": Command("pdserve.commands.bus:main", "look at messages on the bus, or send one"),
    "render": Command("pdserve.commands.render:main", "the Kubernetes objects of a PDService file"),
    "operator": Command("pdserve.operator.main:main", "run the Kubernetes operator: one namespace, or all"),
    "gateway": Command("pdserve.gateway.main:main", "run one gateway process"),
    "prefill": Command("pdserve.prefill_worker.main:main", "run one prefill worker process"),
    "decode": Command("pdserve.decode_worker.main:main", "run one decode worker process"),
}


def usage() -> str:
    """The text of `pdserve --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: pdserve COMMAND [arguments]",
            "",
            "Serves a language model with prefill and decode in separate pools. Start with: pdserve up",
            "",
            *lines,
            "",
            "pdserve COMMAND --help tells more about one; pdserve --version prints the version.",
        ]
    )


def load(command: Command) -> Callable[[list[str]], int | None]:
    """Import a subcommand's module and return its function."""
    module, _, function = command.target.partition(":")
    loaded: Callable[[list[str]], int | None] = getattr(import_module(module), function)
    return loaded


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand. Exit status: its own; 1 after an expected error, 2 after wrong usage, 130 after Ctrl-C."""
    arguments = sys.argv[1:] if argv is None else argv
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if name in ("-V", "--version"):
        print(f"pdserve {__version__}")
        return 0
    if name not in COMMANDS:
        print(f"pdserve: there is no command {name!r}{perhaps(name, COMMANDS)}\n\n{usage()}", file=sys.stderr)
        return 2
    if not sys.platform.startswith("linux"):
        print(
            f"pdserve runs on Linux, and this is {sys.platform}: use a container or a virtual machine", file=sys.stderr
        )
        return 1
    return run(name, rest)


def run(name: str, arguments: list[str]) -> int:
    """Run one subcommand that exists; expected errors become one sentence on stderr."""
    try:
        return load(COMMANDS[name])(arguments) or 0
    except PdserveError as error:
        print(f"pdserve {name}: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `pdserve … | head`
        sys.stderr.close()
        return 1
