"""`python -m pdserve.prefill_worker`."""

import sys

from pdserve.cli import run

sys.exit(run("prefill", sys.argv[1:]))
