"""Settings: read once at a process's start, cast once, complaining by name.

A process calls `load(GatewaySettings, argv, env)` and hands plain values to its constructors; nothing below
a constructor sees a settings object. A CLI flag (`--kv-lease-s 5`) wins over the environment
(`PDS_KV_LEASE_S=5`), that over a YAML file (`--config FILE`, `kv_lease_s: 5`), that over the default.

    kinds.py      what a value may be, and the sentence for a bad one
    field.py      one setting: default, unit, help, the reason for its default
    processes.py  the settings of each process
    load.py       the four sources, unknown names, `describe` for `pdserve config --json`
"""

from pdserve.settings.load import describe, help_text, known_names, load
from pdserve.settings.processes import (
    DecodeSettings,
    GatewaySettings,
    PrefillSettings,
    SharedSettings,
    WorkerSettings,
)

__all__ = [
    "DecodeSettings",
    "GatewaySettings",
    "PrefillSettings",
    "SharedSettings",
    "WorkerSettings",
    "describe",
    "help_text",
    "known_names",
    "load",
]
