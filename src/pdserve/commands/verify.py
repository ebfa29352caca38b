"""`pdserve verify`: is what the service says exactly what the model says? Exit status 1 when it is not."""

from __future__ import annotations

import os
import sys

from pdserve.errors import PdserveError
from pdserve.verify.plan import parse_stages
from pdserve.verify.progress import Progress
from pdserve.verify.verification import Verification


def main(argv: list[str] | None = None) -> int:
    """0 when every token is right (or a rare tie) and every KV block was given back."""
    # Before torch is loaded: threads that spin while they wait cost a busy machine a factor of ten.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    progress = Progress(sys.stdout)
    verification = Verification(os.environ, progress)
    has_failed = False
    try:
        for stage in parse_stages(argv):
            verification.run(stage)
    except PdserveError as error:
        print(f"pdserve verify: {error}", file=sys.stderr)
        has_failed = True
    except KeyboardInterrupt:
        print("pdserve verify: interrupted", file=sys.stderr)
        return 130
    progress.line(str(verification.tally))
    return 0 if verification.is_ok and not has_failed else 1
