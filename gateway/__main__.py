"""`python -m pdserve.gateway`."""

from __future__ import annotations

import sys

from pdserve.errors import PdserveError
from pdserve.gateway.main import main

try:
    sys.exit(main(sys.argv[1:]))
except PdserveError as error:
    sys.exit(f"pdserve gateway: {error}")
