"""Settings: read once at a process's start, cast once, complaining by name.

A process calls `load(GatewaySettings, argv, env)` and hands plain values to its constructors; nothing below
a constructor sees a settings object. A CLI flag (`--kv-lease-s 5`) wins over the environment
(`PDS_KV_LEASE_S=5`), that over a YAML file (`--config FILE`, `kv_lease_s: 5`), that over the default.
docs/settings.md lists them all; what is accepted is read, and what is not supported yet is refused.

    kinds.py    what a value may be, and the sentence for a bad one
    field.py    one setting: default, unit, help, the reason for its default; or the reason for refusing it
    shared.py   log, bus, and what gateways and workers have in common
    gateway.py  the gateway's
    worker.py   both roles' workers
    roles.py    role → settings, and variables of the environment that are none
    load.py     the four sources, unknown names, `describe` for `pdserve config --json`
"""

from pdserve.settings.gateway import GatewaySettings
from pdserve.settings.load import describe, help_text, known_names, load
from pdserve.settings.shared import BusSettings, ProcessSettings, SharedSettings
from pdserve.settings.worker import DecodeSettings, PrefillSettings, WorkerSettings

__all__ = [
    "BusSettings",
    "DecodeSettings",
    "GatewaySettings",
    "PrefillSettings",
    "ProcessSettings",
    "SharedSettings",
    "WorkerSettings",
    "describe",
    "help_text",
    "known_names",
    "load",
]
