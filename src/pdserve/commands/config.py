"""`pdserve config [gateway|prefill|decode] [--json] [flags]`: every setting with value, default, unit and origin."""

from __future__ import annotations

import json
import os

from pdserve.local.plan import ROLES
from pdserve.settings import describe

_HELP = """usage: pdserve config [gateway|prefill|decode] [--json] [--config FILE] [--NAME VALUE]...

Shows what a process of that role (all roles without one) would run with, given this environment and these flags.
"""


def main(argv: list[str]) -> int:
    """Print a list, or with --json `[{role, name, value, default, unit, origin, help, …}]`."""
    if {"-h", "--help"} & set(argv):
        print(_HELP, end="")
        return 0
    as_json = "--json" in argv
    flags = [word for word in argv if word != "--json"]
    roles = [flags.pop(0)] if flags and flags[0] in ROLES else list(ROLES)
    rows = [{"role": role, **row} for role in roles for row in describe(ROLES[role], flags, os.environ)]
    print(json.dumps(rows, indent=2) if as_json else "\n\n".join(_text(role, rows) for role in roles))
    return 0


def _text(role: str, rows: list[dict[str, object]]) -> str:
    lines = [f"{role}:"]
    for row in rows:
        if row["role"] == role:
            value = f"{row['value']} {row['unit']}".strip()
            origin = "" if row["origin"] == "default" else f"  ({row['origin']})"
            lines.append(
                f"  {row['name']:<24} {value}{origin}\n{'':<27}{row['help']} Default {row['default']}: {row['why']}"
            )
    return "\n".join(lines)
