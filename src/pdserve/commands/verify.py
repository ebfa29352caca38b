"""`pdserve verify`: is what the service says exactly what the model says? Exit status 1 when it is not."""

from __future__ import annotations

import os
import sys

from pdserve.errors import PdserveError, SettingError
from pdserve.verify.plan import parse_stages
from pdserve.verify.progress import Progress
from pdserve.verify.verification import Verification

_BEFORE_TORCH = {
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin while they wait cost a busy machine a factor of ten
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


def main(argv: list[str] | None = None) -> int:
    """0 when every token is right (or a rare tie) and every KV block was given back."""
    _prepare_environment()
    progress = Progress(sys.stdout)
    verification = Verification(os.environ, progress)
    has_failed = False
    try:
        for stage in parse_stages(argv):
            verification.run(stage)
    except SettingError as error:
        print(f"pdserve verify: {error}", file=sys.stderr)
        return error.exit_status
    except PdserveError as error:
        print(f"pdserve verify: {error}", file=sys.stderr)
        has_failed = True
    except KeyboardInterrupt:
        print("pdserve verify: interrupted", file=sys.stderr)
        return 130
    progress.line(str(verification.tally))
    return 0 if verification.is_ok and not has_failed else 1


def _prepare_environment() -> None:
    """Read by the libraries when they are loaded, which is later."""
    for name, value in _BEFORE_TORCH.items():
        os.environ.setdefault(name, value)
