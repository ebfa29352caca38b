"""Where the service of this machine answers. Never starts one."""

from __future__ import annotations

from collections.abc import Mapping

from pdserve.errors import ServiceError
from pdserve.local.service_file import read, read_all
from pdserve.models.resolve import home_folder

DEFAULT_URL = "http://127.0.0.1:8000"


def find_service_url(env: Mapping[str, str]) -> str:
    """Base URL of the running local service (`PDS_SERVICE` names one of several); the default port's if none is known.

    Raises:
        ServiceError: several run and none is named.
    """
    home, name = home_folder(env), env.get("PDS_SERVICE")
    services = [found for found in [read(home, name)] if found] if name else read_all(home)
    if len(services) > 1:
        urls = ", ".join(f"{service.service} at {service.url}" for service in services)
        raise ServiceError(f"several services run here ({urls}): choose one with --url or PDS_SERVICE")
    return services[0].url if services else DEFAULT_URL
