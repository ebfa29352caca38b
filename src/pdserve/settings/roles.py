"""The roles of a service and their settings, and the variables of the environment that are no setting."""

from __future__ import annotations

from pdserve.settings.gateway import GatewaySettings
from pdserve.settings.shared import SharedSettings
from pdserve.settings.worker import DecodeSettings, PrefillSettings

ROLES: dict[str, type[SharedSettings]] = {
    "gateway": GatewaySettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
}

ENVIRONMENT_ONLY = {
    "CONFIG": "Path of a YAML file with settings, as the flag --config names it.",
    "HOME": "Folder of downloaded and converted models, and of running services.",
    "CPU_KERNELS": "With off the CPU kernels are not used, as if they had not been compiled.",
    "CPU_ISA": "Instruction set of the CPU kernels, for tests; without it the best of this processor.",
    "FAULTS": "Test hooks: 1, or a JSON object of faults that the process makes on purpose.",
    "PRODUCTION": "When it is set, a process with test hooks refuses to start.",
    "KUBE_BINARIES": "Folder of the Kubernetes binaries that the cluster tests start.",
    "TRACES": "Folder of public request traces that tests read.",
}
"""Name after `PDS_` → what it says. They are read where they matter, and are neither flags nor settings."""
