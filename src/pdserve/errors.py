"""Every exception that pdserve raises on purpose. A message is a sentence that says what to do.

    PdserveError
    ├── SettingError          a setting is unknown or has a bad value (names setting, value, what was expected)
    ├── ModelError            a model cannot be found, read or served
    ├── BusError              the bus (Redis) did not answer in time, or a message cannot be read
    ├── TransferError         a KV transfer cannot be set up or failed
    │   └── IncompatibleError     the two sides differ in their KV signature
    ├── ServiceError          the processes of one machine's service cannot be started or found
    ├── ProcessError          a process cannot go on: a background task or its HTTP port has died
    ├── NoCapacityError       a reservation does not fit right now; nothing was taken
    └── RequestError          a client's request cannot be served (carries status, param, code)
        ├── InvalidRequestError   400: the request itself is wrong
        ├── OverloadedError       429: try again after `retry_after_s`
        └── UnavailableError      503: no pair of workers is ready

Programming errors are `assert`s with the values in the message; they are never caught to go on.
"""

from __future__ import annotations

from pdserve.reasons import TransferReason


class PdserveError(Exception):
    """Root of all expected errors."""

    exit_status = 1
    """What a command ends with."""


class SettingError(PdserveError):
    """A setting has an unknown name or a bad value: wrong usage."""

    exit_status = 2

    def __init__(self, name: str, value: object, expected: str) -> None:
        """`value` is None where none was given."""
        self.name, self.value, self.expected = name, value, expected
        got = "" if value is None else f"got {value!r}, "
        super().__init__(f"setting {name}: {got}expected {expected}")


class ModelError(PdserveError):
    """A model cannot be found, read or served; the message names the remedy."""


class BusError(PdserveError):
    """The bus did not answer within its timeout, or a message on it cannot be read."""


class TransferError(PdserveError):
    """A KV transfer cannot be set up, or failed; `reason` is of a closed set."""

    def __init__(self, reason: TransferReason, detail: str = "") -> None:
        self.reason = reason
        super().__init__(f"{reason}: {detail}" if detail else reason)


class IncompatibleError(TransferError):
    """The two sides of a hand-off differ in their KV signature; the message lists the fields that differ."""

    def __init__(self, detail: str) -> None:
        super().__init__(TransferReason.GEOMETRY, detail)


class ServiceError(PdserveError):
    """The processes of this machine's service cannot be started or found (port taken, already running, died)."""


class ProcessError(PdserveError):
    """This process cannot go on, for something that it needs all the time has died; the message says what."""


class NoCapacityError(PdserveError):
    """A reservation does not fit into the block pool right now. Nothing was taken."""


class RequestError(PdserveError):
    """A client's request ends with an HTTP error. `message` is shown to the client: no paths, no addresses."""

    status = 500
    type = "server_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        self.message, self.param, self.code, self.retry_after_s = message, param, code, retry_after_s
        if status is not None:
            self.status = status
        super().__init__(message)


class InvalidRequestError(RequestError):
    """The request itself is wrong; `param` names the field."""

    status = 400
    type = "invalid_request_error"


class OverloadedError(RequestError):
    """The queue is full or the predicted wait exceeds the deadline."""

    status = 429
    type = "rate_limit_error"


class UnavailableError(RequestError):
    """No prefill/decode pair is ready, or a request could not be finished after its last attempt."""

    status = 503
    type = "service_unavailable"
