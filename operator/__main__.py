"""`python -m pdserve.operator`: the same as `pdserve operator`."""  # noqa: A005

from __future__ import annotations

import sys

from pdserve.cli import run

sys.exit(run("operator", sys.argv[1:]))
