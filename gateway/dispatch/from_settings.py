"""Builds the dispatcher of a gateway process from its settings: each limit goes to the part that keeps it."""

from __future__ import annotations

from functools import partial
from typing import cast

from pdserve.bus.bus import Bus
from pdserve.bus.registry import RegistryView
from pdserve.errors import SettingError
from pdserve.gateway.dispatch.admission import AdmissionLimits
from pdserve.gateway.dispatch.dispatch_loop import DispatchLoop, WaitLimits
from pdserve.gateway.dispatch.dispatcher import Dispatcher
from pdserve.gateway.dispatch.exchange import is_inbox_full
from pdserve.gateway.dispatch.outcomes import RetryLimits
from pdserve.gateway.generation.request import Sender
from pdserve.gateway.observers import DispatchObserver
from pdserve.gateway.routing.placement import Placement
from pdserve.gateway.routing.router import Disaggregation, Mode, Router
from pdserve.settings import GatewaySettings


def dispatcher_from(
    settings: GatewaySettings, bus: Bus, view: RegistryView, sender: Sender, observer: DispatchObserver
) -> Dispatcher:
    """The dispatcher of one gateway process.

    Raises:
        SettingError: two settings exclude each other.
    """
    waits = WaitLimits(
        bus_timeout_s=settings.bus_timeout_s,
        hold_timeout_s=settings.hold_timeout_s,
        redispatch_wait_s=settings.redispatch_wait_s,
        is_holding=settings.hold_requests > 0,
    )
    placement = Placement(
        Router(sender.fingerprint, disaggregation_from(settings)),
        settle_after_s=settings.heartbeat_s / 4,
        is_inbox_full=partial(is_inbox_full, bus),
    )
    return Dispatcher(
        bus,
        view,
        DispatchLoop(placement, waits),
        sender,
        observer=observer,
        retry_limits=RetryLimits(
            max_attempts=settings.max_attempts,
            kv_lease_s=settings.kv_lease_s,
            progress_timeout_s=settings.progress_timeout_s,
            roster_grace_s=settings.heartbeat_s,
        ),
        admission_limits=AdmissionLimits(
            max_queue_requests=settings.max_queue_requests,
            max_queue_tokens=settings.max_queue_tokens,
            max_held_requests=settings.hold_requests,
            bus_timeout_s=settings.bus_timeout_s,
        ),
    )


def disaggregation_from(settings: GatewaySettings) -> Disaggregation:
    """LOCAL_PREFILL=never leaves prefill workers only.

    Raises:
        SettingError: DISAGGREGATION=never beside it, for then no worker would compute prompts.
    """
    mode = settings.disaggregation
    if settings.local_prefill == "never":
        if mode == "never":
            raise SettingError(
                "LOCAL_PREFILL", "never", "auto, for with DISAGGREGATION=never no prefill worker is left"
            )
        mode = "always"
    return Disaggregation(cast(Mode, mode), settings.min_remote_tokens)
