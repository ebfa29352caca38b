"""The reasons that conditions and events of a PDService show: one closed set, which programs may rely on."""

from __future__ import annotations

import enum


class Reason(enum.StrEnum):
    """Why a condition holds or does not; docs/kubernetes.md says what to do about each."""

    READY = "Ready"
    AS_EXPECTED = "AsExpected"

    STARTING = "Starting"
    WAITING_FOR_VOLUMES = "WaitingForVolumes"
    DRAINING = "Draining"
    SCALED_TO_ZERO = "ScaledToZero"
    UNKNOWN = "Unknown"
    """A pod runs and is not ready, and its answer does not say why: it may be of another version."""

    UNSCHEDULABLE = "Unschedulable"
    CANNOT_CREATE_PODS = "CannotCreatePods"
    MISSING_SECRET = "MissingSecret"  # noqa: S105
    MISSING_CONFIG = "MissingConfig"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    CRASH_LOOPING = "CrashLooping"
    REDIS_UNAVAILABLE = "RedisUnavailable"
    TRANSFERS_FAILING = "TransfersFailing"
    STEP_HANGS = "StepHangs"
    NO_PAIR = "NoPair"

    COMPLETE = "Complete"
    ROLLING_OUT = "RollingOut"
    NO_ROOM_TO_SURGE = "NoRoomToSurge"

    INVALID_SPEC = "InvalidSpec"
    REFUSED_BY_API_SERVER = "RefusedByApiServer"

    AUTO = "Auto"
    ADVISE = "Advise"
    OFF = "Off"
    POLICY_NOT_USABLE = "PolicyNotUsable"
    NOT_SUPPORTED_YET = "NotSupportedYet"

    SCALED = "Scaled"
    """An event alone: the number of workers was changed."""
