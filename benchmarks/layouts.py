"""How a prefill and a decode worker share this machine's cores: threads, niceness, pinning, the way of waiting.

`p1d2+nice10` is one thread for prefill, two for decode, prefill at niceness 10; `+rest90` lets decode steps begin 90 ms
apart while prompts are computed; `+pin` pins the workers to different cores, `+active` lets OpenMP threads spin
(those of our own CPU kernels sleep after half a millisecond). Services for several layouts run at the same time, so
that they can be measured in turns: idle ones cost memory and no time, unless they spin.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pdserve.errors import SettingError
from pdserve.local.plan import YIELDING_NICENESS, step_interval_s, threads_for
from pdserve.local.service import PrivateService
from pdserve.settings import GatewaySettings, load

_PATTERN = re.compile(r"p(\d+)d(\d+)((?:\+(?:nice\d+|rest\d+|pin|active))*)")


@dataclass(frozen=True, slots=True)
class Layout:
    """How two workers share the cores: which computes where, and which yields."""

    prefill_threads: int
    decode_threads: int
    niceness: int = 0
    """Niceness of the prefill worker; that of the decode worker is 0."""
    rest_ms: int = 0
    """Least milliseconds between the beginnings of decode steps while prompts are computed."""
    is_pinned: bool = False
    waits_actively: bool = False

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read a layout as the command line names it, such as `p1d2+nice10`.

        Raises:
            SettingError: it is none.
        """
        found = _PATTERN.fullmatch(text)
        if found is None:
            raise SettingError("--layouts", text, "layouts such as p1d2, p2d2+nice10 or p1d1+pin")
        options = found[3].split("+")

        def number(name: str) -> int:
            return max((int(option.removeprefix(name)) for option in options if option.startswith(name)), default=0)

        threads = int(found[1]), int(found[2])
        return cls(*threads, number("nice"), number("rest"), "pin" in options, "active" in options)

    def __str__(self) -> str:
        parts = [f"p{self.prefill_threads}d{self.decode_threads}"]
        parts += [f"nice{self.niceness}"] if self.niceness else []
        parts += [f"rest{self.rest_ms}"] if self.rest_ms else []
        return "+".join(parts + ["pin"] * self.is_pinned + ["active"] * self.waits_actively)

    @property
    def start(self) -> tuple[int, int, int, bool]:
        """What is fixed when the processes start; all else can be changed while they run."""
        return self.prefill_threads, self.decode_threads, self.rest_ms, self.waits_actively

    def cores(self, role: str) -> set[int]:
        """Cores that a worker of this role computes on."""
        usable = sorted(os.sched_getaffinity(0))
        if not self.is_pinned:
            return set(usable)
        decode = max(1, round(len(usable) * self.decode_threads / (self.decode_threads + self.prefill_threads)))
        return set(usable[:decode]) if role == "decode" else set(usable[decode:] or usable)


def _of_up() -> Layout:
    threads = threads_for(os.cpu_count() or 1, 1, 1)
    interval_s = step_interval_s(load(GatewaySettings).tpot_slo_s, num_prefill=1) or 0.0
    return Layout(threads.prefill, threads.decode, niceness=YIELDING_NICENESS, rest_ms=round(1e3 * interval_s))


UP = _of_up()
"""The layout that `pdserve up` chooses on this machine."""


class Services:
    """One service for each different start of some layouts; a context manager.

    Args:
        settings: of all processes.
    """

    def __init__(self, model: str, layouts: Sequence[Layout], settings: Mapping[str, Any] | None = None) -> None:
        self._services = {layout.start: _service(model, layout, settings or {}) for layout in layouts}

    def __enter__(self) -> Self:
        for service in self._services.values():
            service.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for service in self._services.values():
            service.stop()

    def under(self, layout: Layout) -> PrivateService:
        """The service with this layout, which it has from now on.

        Raises:
            PermissionError: a lower niceness than before needs root.
        """
        service = self._services[layout.start]
        for role in ("prefill", "decode"):
            pid = service.process(role).pid
            assert pid is not None, f"the {role} worker is gone"
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.setpriority(os.PRIO_PROCESS, int(thread.name), layout.niceness if role == "prefill" else 0)
                os.sched_setaffinity(int(thread.name), layout.cores(role))
        return service


def _service(model: str, layout: Layout, settings: Mapping[str, Any]) -> PrivateService:
    decode: dict[str, Any] = {"THREADS": layout.decode_threads}
    if layout.rest_ms:
        decode["STEP_INTERVAL_S"] = layout.rest_ms / 1e3
    service = PrivateService(
        model,
        settings=settings,
        role_settings={"prefill": {"THREADS": layout.prefill_threads}, "decode": decode},
    )
    if layout.waits_actively:
        for worker in service.workers:
            worker.env["OMP_WAIT_POLICY"] = "ACTIVE"
    return service
