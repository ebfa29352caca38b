"""Benchmarks are no part of the installed package: they are found from the repository's root, as when they are run."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
