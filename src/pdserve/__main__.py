"""`python -m pdserve` is the `pdserve` command; nothing is imported from the current folder."""

import os
import sys

if not sys.flags.safe_path:
    del sys.path[0]
    os.environ["PYTHONSAFEPATH"] = "1"

from pdserve.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
