"""Admission: what is refused before it waits. Pure.

400: can never fit, with the three numbers. 429: the queue is full, or waiting would outlast the deadline.
503: no workers for it, or no bus (unless requests are held for a pool that scales from zero).
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.errors import InvalidRequestError, OverloadedError, RequestError, UnavailableError
from pdserve.gateway.generation.request import GenerationRequest
from pdserve.reasons import RefusalReason
from pdserve.settings import GatewaySettings

UNAVAILABLE_RETRY_S = 2.0
"""A registration needs about a heartbeat to be seen."""


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Bounds of what may wait in one gateway."""

    max_queue_requests: int = GatewaySettings.max_queue_requests
    max_queue_tokens: int = GatewaySettings.max_queue_tokens
    max_held_requests: int = GatewaySettings.hold_requests
    """Requests that may wait while there is no pair at all; 0: they are answered 503."""
    bus_timeout_s: float = GatewaySettings.bus_timeout_s


@dataclass(frozen=True, slots=True)
class ServiceView:
    """What admission sees of the service at the moment a request arrives."""

    now_s: float
    num_queued_requests: int
    num_queued_tokens: int
    max_total_tokens: int | None
    """Prompt and output tokens that every pair can hold; None: there is no pair."""
    has_workers: bool
    """Whether workers that can serve this very request (its pins, its mode) are ready."""
    is_stream_full: bool
    """Whether every prefill worker's inbox is over its bound."""
    num_tokens_ahead: int
    """Prompt tokens that are queued here or outstanding at prefill workers."""
    prefill_tokens_per_s: float
    """The rate of all prefill workers together; 0: not measured."""
    bus_down_s: float
    """Time since the bus went away; 0: it is there."""
    is_draining: bool

    @property
    def predicted_wait_s(self) -> float:
        """Until a request that arrives now reaches a prefill worker; 0 when no rate is known."""
        return self.num_tokens_ahead / self.prefill_tokens_per_s if self.prefill_tokens_per_s else 0.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request is not let in: `reason` for the metric, `error` for the client."""

    reason: RefusalReason
    error: RequestError


def check(request: GenerationRequest, view: ServiceView, limits: AdmissionLimits) -> Refusal | None:
    """None: the request may come in and wait."""
    return _check_fit(request, view) or _check_service(view, limits) or _check_load(request, view, limits)


def no_workers_error() -> UnavailableError:
    """No worker is there to serve a request."""
    return UnavailableError(
        "The workers that this request needs are not ready; try again later.",
        code="no_workers",
        retry_after_s=UNAVAILABLE_RETRY_S,
    )


def bus_error() -> UnavailableError:
    """Workers cannot be reached, for the bus is away."""
    return UnavailableError(
        "The service cannot reach its workers at the moment; try again later.",
        code="bus_unavailable",
        retry_after_s=UNAVAILABLE_RETRY_S,
    )


def shutdown_error() -> UnavailableError:
    """This gateway is going away."""
    return UnavailableError(
        "The service is shutting down; try again.", code="shutting_down", retry_after_s=UNAVAILABLE_RETRY_S
    )


def _check_fit(request: GenerationRequest, view: ServiceView) -> Refusal | None:
    num_prompt, max_tokens, limit = len(request.prompt_token_ids), request.sampling.max_tokens, view.max_total_tokens
    if limit is None or num_prompt + max_tokens <= limit:
        return None
    error = InvalidRequestError(
        f"The prompt has {num_prompt} tokens and max_tokens is {max_tokens}, together more than the "
        f"{limit} tokens that this model can hold here; shorten the prompt or lower max_tokens.",
        param="max_tokens" if num_prompt < limit else "prompt",
        code="context_length_exceeded",
    )
    return Refusal(RefusalReason.TOO_LONG, error)


def _check_service(view: ServiceView, limits: AdmissionLimits) -> Refusal | None:
    if view.is_draining:
        return Refusal(RefusalReason.DRAINING, shutdown_error())
    if view.bus_down_s > limits.bus_timeout_s:
        return Refusal(RefusalReason.BUS, bus_error())
    if not view.has_workers and view.num_queued_requests >= limits.max_held_requests:
        return Refusal(RefusalReason.NO_WORKERS, no_workers_error())
    return None


def _check_load(request: GenerationRequest, view: ServiceView, limits: AdmissionLimits) -> Refusal | None:
    num_tokens = view.num_queued_tokens + len(request.prompt_token_ids)
    if view.num_queued_requests >= limits.max_queue_requests:
        return _overloaded(RefusalReason.QUEUE_REQUESTS, "too many requests are waiting", view)
    if view.num_queued_requests and num_tokens > limits.max_queue_tokens:
        return _overloaded(RefusalReason.QUEUE_TOKENS, "too many prompt tokens are waiting", view)
    if view.is_stream_full:
        return _overloaded(RefusalReason.STREAM_FULL, "the workers do not keep up with their messages", view)
    if view.now_s + view.predicted_wait_s > request.deadline_s:
        return _overloaded(RefusalReason.DEADLINE, "the wait would outlast the request's deadline", view)
    return None


def _overloaded(reason: RefusalReason, why: str, view: ServiceView) -> Refusal:
    error = OverloadedError(
        f"The service is overloaded: {why}. Try again later.",
        code="overloaded",
        retry_after_s=max(1.0, view.predicted_wait_s),
    )
    return Refusal(reason, error)
