"""`pdserve make-model DIR --arch A --seed S`: write a tiny random model, for tests and experiments."""

from __future__ import annotations

from pathlib import Path

from pdserve.arguments import CommandParser, perhaps
from pdserve.errors import SettingError


def main(argv: list[str]) -> int:
    """Write the folder and print its path."""
    parser = CommandParser(prog="pdserve make-model", description="Write a tiny random model.")
    parser.add_argument("directory", type=Path, help="folder to write; made when missing")
    parser.add_argument("--arch", default="llama", help="llama, qwen2, qwen3, mistral, gemma2 or phi3")
    parser.add_argument("--seed", type=int, default=0, help="equal seeds give equal bytes")
    arguments = parser.parse_args(argv)

    from transformers.utils import logging  # noqa: PLC0415  (seconds that --help does not need)

    from pdserve.models.tiny import ARCHITECTURES, make_model  # noqa: PLC0415

    if arguments.arch not in ARCHITECTURES:
        expected = f"one of {', '.join(ARCHITECTURES)}{perhaps(arguments.arch, ARCHITECTURES)}"
        raise SettingError("--arch", arguments.arch, expected)
    logging.disable_progress_bar()
    print(make_model(arguments.directory, arguments.arch, arguments.seed))
    return 0
