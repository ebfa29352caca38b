"""Where the service of this machine answers. Never starts one."""

from __future__ import annotations

from collections.abc import Mapping

DEFAULT_URL = "http://127.0.0.1:8000"


def find_service_url(env: Mapping[str, str]) -> str:
    """Base URL of the running local service; the default port's when nothing is known to run."""
    return DEFAULT_URL
