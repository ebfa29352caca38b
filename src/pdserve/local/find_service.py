"""Where the service of this machine answers. Never starts one."""

from __future__ import annotations

from collections.abc import Mapping

from pdserve.arguments import base_url
from pdserve.errors import ServiceError
from pdserve.local.service_file import read, read_all
from pdserve.models.resolve import home_folder

DEFAULT_URL = "http://127.0.0.1:8000"


def service_url(url: str | None, service: str | None, env: Mapping[str, str]) -> str:
    """The base URL that a command shall use: `url` as it was typed, else that of a service of this machine.

    Args:
        url: of `--url`.
        service: of `--service`; else `PDS_SERVICE` names one of several.
        env: the environment.

    Raises:
        SettingError: the URL is none.
        ServiceError: several services run and none is named, or the named one does not run.
    """
    if url is not None:
        return base_url(url)
    home, name = home_folder(env), service or env.get("PDS_SERVICE")
    if name:
        found = read(home, name)
        if found is None:
            running = ", ".join(service.service for service in read_all(home)) or "none"
            raise ServiceError(f"no service {name!r} runs on this machine (running: {running})")
        return found.url
    services = read_all(home)
    if len(services) > 1:
        urls = ", ".join(f"{service.service} at {service.url}" for service in services)
        raise ServiceError(f"several services run here ({urls}): choose one with --service or --url")
    return services[0].url if services else DEFAULT_URL
