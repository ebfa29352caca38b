"""`python -m pdserve.gateway`."""

import sys

from pdserve.cli import run

sys.exit(run("gateway", sys.argv[1:]))
