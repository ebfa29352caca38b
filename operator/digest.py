"""Short digests of plain data, equal for equal content."""

from __future__ import annotations

import hashlib
import json


def digest_of(value: object, length: int = 10) -> str:
    """Hex digest of anything JSON can say; the order of keys does not matter."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:length]
