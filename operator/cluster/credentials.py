"""How to reach the API server: in a pod by its ServiceAccount, elsewhere by KUBECONFIG. Read anew when asked again."""

from __future__ import annotations

import base64
import os
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pdserve.errors import PdserveError

_POD_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class ClusterError(PdserveError):
    """The cluster cannot be reached, or does not answer as needed; the message says what to do."""


@dataclass(frozen=True)
class Credentials:
    """Everything needed for a connection; certificates and key as PEM."""

    server: str
    authority: str | None
    is_insecure: bool
    certificate: str | None
    key: str | None
    token: str | None
    namespace: str

    def tls(self) -> ssl.SSLContext:
        """For an HTTP client."""
        context = ssl.create_default_context(cadata=self.authority)
        if self.is_insecure:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if self.certificate and self.key:
            _load_pair(context, self.certificate, self.key)
        return context


def read_credentials() -> Credentials:
    """KUBECONFIG when set, else the pod's ServiceAccount, else ~/.kube/config.

    Raises:
        ClusterError: there is neither.
    """
    named = os.environ.get("KUBECONFIG")
    if not named and (_POD_FOLDER / "token").is_file():
        return _from_pod()
    file = Path(named.split(os.pathsep)[0]) if named else Path.home() / ".kube" / "config"
    try:
        return _from_kubeconfig(yaml.safe_load(file.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError, KeyError, StopIteration) as error:
        raise ClusterError(f"no cluster: {file} cannot be used ({error!r}); set KUBECONFIG or run in a pod") from error


def _from_pod() -> Credentials:
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    return Credentials(
        server=f"https://{f'[{host}]' if ':' in host else host}:{port}",
        authority=(_POD_FOLDER / "ca.crt").read_text(),
        is_insecure=False,
        certificate=None,
        key=None,
        token=(_POD_FOLDER / "token").read_text().strip(),
        namespace=(_POD_FOLDER / "namespace").read_text().strip(),
    )


def _from_kubeconfig(config: dict[str, Any]) -> Credentials:
    context = _named(config["contexts"], config["current-context"])["context"]
    cluster = _named(config["clusters"], context["cluster"])["cluster"]
    user = _named(config["users"], context["user"])["user"]
    return Credentials(
        server=cluster["server"].rstrip("/"),
        authority=_data(cluster, "certificate-authority"),
        is_insecure=bool(cluster.get("insecure-skip-tls-verify")),
        certificate=_data(user, "client-certificate"),
        key=_data(user, "client-key"),
        token=user.get("token"),
        namespace=context.get("namespace", "default"),
    )


def _named(items: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(item for item in items if item["name"] == name)


def _data(holder: dict[str, Any], name: str) -> str | None:
    if f"{name}-data" in holder:
        return base64.b64decode(holder[f"{name}-data"]).decode()
    return Path(holder[name]).read_text(encoding="utf-8") if name in holder else None


def _load_pair(context: ssl.SSLContext, certificate: str, key: str) -> None:
    """ssl reads keys from files alone; this one is gone again at once."""
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(f"{certificate}\n{key}")
        file.flush()
        context.load_cert_chain(file.name)
