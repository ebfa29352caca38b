"""`python -m pdserve.decode_worker`."""

import sys

from pdserve.cli import run

sys.exit(run("decode", sys.argv[1:]))
