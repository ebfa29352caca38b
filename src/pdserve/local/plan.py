"""Which processes `pdserve up` starts, and with which settings. Pure: reads no file, starts nothing.

    pdserve up --prefill 2 --kv-lease-s 5 --decode.max-num-seqs 8

`--prefill`, `--decode` and `--gateways` are numbers of processes, `--ROLE.NAME` is a setting of one role, and
any other flag is a setting of every role that knows it. Settings from the environment and from `--config` reach
the children by themselves; what is added here yields to them, unless a process cannot share it (ports, ids).
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pdserve.arguments import perhaps
from pdserve.errors import SettingError
from pdserve.settings import DecodeSettings, GatewaySettings, PrefillSettings, SharedSettings, describe, load
from pdserve.settings.load import known_names

ROLES: dict[str, type[SharedSettings]] = {
    "gateway": GatewaySettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
}
YIELDING_NICENESS = 4
"""On shared cores prefill yields to decode. Measured on two: at 10 a batch of prompts and answers takes 15 % longer,
at 0 the longest gaps of running streams grow by a third (docs/benchmarks.md)."""
_REST_RATIO = 0.9
"""Share of the target for the time per output token that steps are apart; the rest is left for delays."""

_OWN_SETTINGS = {"WORKER_ID", "METRICS_PORT"}
_OWN_FLAGS = ("--prefill", "--decode", "--gateways", "--no-restart", "--verbose", "--redis")
"""Settings that two processes cannot share."""


@dataclass(frozen=True)
class UpOptions:
    """What the command line asks for."""

    num: dict[str, int]
    """Number of processes by role."""
    flags: dict[str, list[str]]
    """Settings by role, as the role's own command takes them."""
    restarts: bool = True
    is_verbose: bool = False


@dataclass(frozen=True)
class ChildSpec:
    """One process to keep running."""

    role: str
    id: str
    command: list[str]
    ready_url: str
    """Base URL of /ready, /health, /metrics and /debug."""
    api_url: str = ""
    """Base URL that clients of a gateway use; empty for workers."""
    env: dict[str, str] = field(default_factory=dict)
    """On top of the supervisor's own."""
    niceness: int = 0
    sockets: Mapping[str, socket.socket] = field(default_factory=dict)
    """Ports that its starter holds for it, by the setting that names them."""

    @property
    def url(self) -> str:
        """Where this process answers."""
        return self.api_url or self.ready_url


@dataclass(frozen=True)
class Threads:
    """CPU threads of each worker by role."""

    prefill: int
    decode: int


def parse_up(argv: Sequence[str]) -> UpOptions:
    """Sort `pdserve up`'s arguments by who reads them.

    Raises:
        SettingError: a number of processes is none, or a flag belongs to no role.
    """
    num = {"gateway": 1, "prefill": 1, "decode": 1}
    flags: dict[str, list[str]] = {role: [] for role in ROLES}
    switches: set[str] = set()
    for name, words in _flags(argv):
        role, dot, setting = name.partition(".")
        if name in ("no-restart", "verbose"):
            switches.add(name)
        elif name in ("prefill", "decode", "gateways"):
            num[name.removesuffix("s")] = _number(name, words)
        elif dot and role in ROLES:
            flags[role] += _joined(_allowed(setting, name), words)
        else:
            flag = _allowed("redis-url" if name == "redis" else name, name)
            _check_spelling(flag, words)
            for known in _roles_that_know(flag):
                flags[known] += _joined(flag, words)
    if num["gateway"] < 1 or num["prefill"] + num["decode"] < 1:
        raise SettingError("--gateways, --prefill, --decode", num, "at least one gateway and one worker")
    return UpOptions(num, flags, restarts="no-restart" not in switches, is_verbose="verbose" in switches)


def _flags(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """(name, [value]) or (name, []) for each flag; a value follows it or stands behind `=`."""
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise SettingError("pdserve up", word, "a flag that starts with --")
        name, equals, value = word.removeprefix("--").partition("=")
        if equals:
            yield name, [value]
        else:
            yield name, [words.pop(0)] if words and not words[0].startswith("--") else []


def _allowed(setting: str, flag: str) -> str:
    if setting.replace("-", "_").upper() in _OWN_SETTINGS:
        raise SettingError(f"--{flag}", None, "no such flag: `pdserve up` gives each of its processes its own")
    return setting


def _check_spelling(name: str, words: list[str]) -> None:
    """Complain about what is nearly one of this command's own flags, before a role takes it for a setting."""
    near = perhaps(f"--{name}", _OWN_FLAGS)
    if near and name.removeprefix("no-").replace("-", "_").upper() not in known_names():
        raise SettingError(f"--{name}", words[0] if words else None, f"a flag that exists{near}")


def _joined(name: str, words: list[str]) -> list[str]:
    """One word per flag, so that a value is never taken for another flag."""
    return [f"--{name}={words[0]}" if words else f"--{name}"]


def _number(name: str, words: list[str]) -> int:
    if not words or not words[0].isdecimal():
        raise SettingError(f"--{name}", words[0] if words else None, "a whole number of processes")
    return int(words[0])


def _roles_that_know(name: str) -> list[str]:
    """All when none does: the first to read it complains with a suggestion."""
    setting = name.removeprefix("no-").replace("-", "_").upper()
    own = name.replace("-", "_").upper()
    knowing = [role for role, cls in ROLES.items() if {own, setting} & _names(cls)]
    return list(ROLES) if own == "CONFIG" or not knowing else knowing


def resolved(
    role: str, flags: Sequence[str], env: Mapping[str, str], defaults: Mapping[str, object]
) -> tuple[SharedSettings, list[str]]:
    """One role's settings, and flags for those of `defaults` that the user has not set otherwise.

    Raises:
        SettingError: an unknown name or a bad value.
    """
    cls = ROLES[role]
    usable = {name: value for name, value in defaults.items() if name in _names(cls)}
    unset = {row["name"] for row in describe(cls, flags, env) if row["origin"] == "default"}
    added = [f"--{name.lower().replace('_', '-')}={value}" for name, value in usable.items() if name in unset]
    return load(cls, [*flags, *added], env), added


def _names(cls: type[SharedSettings]) -> set[object]:
    return {row["name"] for row in describe(cls)}


def threads_for(num_cores: int, num_prefill: int, num_decode: int) -> Threads:
    """Each role may use every core: prefill yields by its niceness, and an idle role's cores are not wasted.

    Measured on 2 cores beside 8 streams: the streams' gaps are the same with one prefill thread as with two, and a
    prompt that is alone is computed twice as fast with two.
    """
    return Threads(
        prefill=max(1, num_cores // max(1, num_prefill)),
        decode=max(1, num_cores // max(1, num_decode)),
    )


def step_interval_s(tpot_slo_s: float, num_prefill: int) -> float | None:
    """How far apart decode steps may begin while prompts are computed on the same cores; None: no prefill.

    No client needs tokens faster than the target, so prompts that wait for a first token get the cores meanwhile,
    and the batch that the next step computes is larger. Measured on 2 cores: docs/benchmarks.md.
    """
    return round(_REST_RATIO * tpot_slo_s, 6) if num_prefill else None


def is_set(role: str, name: str, flags: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether a flag, the environment or a file says what this setting is."""
    return any(row["name"] == name and row["origin"] != "default" for row in describe(ROLES[role], flags, env))


def child_command(role: str, flags: list[str]) -> list[str]:
    """The command of a process, the same that a pod runs."""
    return [sys.executable, "-P", "-m", "pdserve", role, *flags]


def worker_spec(
    role: str,
    worker_id: str,
    command: list[str],
    url: str,
    *,
    threads: int,
    yields: bool,
    metrics: socket.socket | None = None,
) -> ChildSpec:
    """The specification of a prefill or decode worker; `yields`: to the others on its cores; `metrics`: its port."""
    return ChildSpec(
        role=role,
        id=worker_id,
        command=command,
        ready_url=url,
        env={"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(threads)},
        niceness=YIELDING_NICENESS if yields else 0,
        sockets={} if metrics is None else {"METRICS_PORT": metrics},
    )
