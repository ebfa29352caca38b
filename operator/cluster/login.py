"""Finds the way to the API server: in a pod by its ServiceAccount, elsewhere by kubeconfig, as kubectl does.

Everything is read by the loaders of the `kubernetes` package: merged files, exec plugins, tokens in files, OIDC,
client certificates. Three things stand here because that package lacks them: the namespace of a pod, a failed exec
plugin as an error (it logs one, and goes on without any identity), and a `tokenFile` that is read again (after the
server has refused its old content). Reading may run a plugin for seconds, so it is done in a thread.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kubernetes.client
import kubernetes.config
import yaml
from kubernetes.config import incluster_config

from pdserve.operator.cluster.credentials import ClusterError, Credentials

_HOME_FILE = "~/.kube/config"
_TOKEN_AGE_S = 30.0
"""The package is asked for its token this often: then it runs a plugin again whose token expires within five minutes,
and reads a pod's token again that is a minute old."""


@dataclass(frozen=True)
class ClusterConfiguration:
    """One way to a cluster, with the package's own means to keep its token fresh."""

    configuration: Any
    """The package's own object: `kubernetes.client.Configuration`."""
    namespace: str

    def credentials(self) -> Credentials:
        """Credentials as of now. May read files and run a plugin."""
        known = self.configuration
        token = known.get_api_key_with_prefix("BearerToken", "authorization")
        return Credentials(
            server=known.host.rstrip("/"),
            namespace=self.namespace,
            authorization=_header(token) if token else None,
            authority_file=known.ssl_ca_cert,
            certificate_file=known.cert_file,
            key_file=known.key_file,
            is_insecure=not known.verify_ssl,
            proxy=known.proxy or None,
        )


def read_configuration() -> ClusterConfiguration:
    """KUBECONFIG when set, else the pod's ServiceAccount, else ~/.kube/config. Blocks.

    Raises:
        ClusterError: there is none of them, or it cannot be used.
    """
    files = os.environ.get("KUBECONFIG")
    is_pod = Path(incluster_config.SERVICE_TOKEN_FILENAME).is_file()
    where = files or ("the pod's ServiceAccount" if is_pod else _HOME_FILE)
    try:
        return _from_pod() if is_pod and not files else _from_kubeconfig(files or _HOME_FILE)
    except (kubernetes.config.ConfigException, OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise ClusterError(f"no cluster: {where} cannot be used ({error}); set KUBECONFIG or run in a pod") from error


def _new_configuration() -> Any:
    configuration = kubernetes.client.Configuration()
    configuration.proxy = ""  # that of a kubeconfig counts; the environment's is for other traffic
    return configuration


def _from_pod() -> ClusterConfiguration:
    configuration = _new_configuration()
    kubernetes.config.load_incluster_config(configuration)
    namespace = Path(incluster_config.SERVICE_TOKEN_FILENAME).with_name("namespace").read_text(encoding="utf-8")
    return ClusterConfiguration(configuration, namespace.strip())


def _from_kubeconfig(files: str) -> ClusterConfiguration:
    configuration = _new_configuration()
    kubernetes.config.load_kube_config(files, client_configuration=configuration)
    _, active = kubernetes.config.list_kube_config_contexts(files)
    context = active["context"]
    user = context.get("user")
    if user and not _has_identity(configuration) and configuration.host.startswith("https:"):
        raise ClusterError(
            f"no cluster: user {user} of context {active['name']} in {files} has no token and no certificate: if it "
            "names an exec plugin, that has failed, and what it said is in the log; run it by hand"
        )
    if configuration.tls_server_name:
        raise ClusterError(
            f"no cluster: context {active['name']} in {files} sets tls-server-name {configuration.tls_server_name}, "
            "which the operator does not support: name a server whose certificate has its name"
        )
    return ClusterConfiguration(configuration, context.get("namespace") or "default")


def _has_identity(configuration: Any) -> bool:
    return bool(configuration.api_key or configuration.cert_file)


def _header(token: str) -> str:
    """With the scheme written as the standard does, and without the line end of a token's file."""
    scheme, _, rest = token.strip().partition(" ")
    return f"{scheme.title()} {rest}"


class ClusterLogin:
    """The process's login: asks again when a token may be old, and reads everything again when it is refused."""

    def __init__(
        self,
        read: Callable[[], ClusterConfiguration] = read_configuration,
        steady_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._steady_s = read, steady_s
        self._lock = asyncio.Lock()
        self._configuration: ClusterConfiguration | None = None
        self._current: Credentials | None = None
        self._asked_s = 0.0

    async def current(self) -> Credentials:
        """The credentials that `Login` promises; asks again after 30 s."""
        if self._current is not None and self._steady_s() - self._asked_s < _TOKEN_AGE_S:
            return self._current
        async with self._lock:
            return await self._ask()

    async def renew(self, refused: Credentials) -> Credentials:
        """Credentials out of files and plugins that are read anew; see `Login`."""
        async with self._lock:
            if self._current is refused:
                self._configuration = self._current = None
            return await self._ask()

    async def _ask(self) -> Credentials:
        if self._current is not None and self._steady_s() - self._asked_s < _TOKEN_AGE_S:
            return self._current  # another request has asked meanwhile
        if self._configuration is None:
            self._configuration = await asyncio.to_thread(self._read)
        found = await asyncio.to_thread(self._configuration.credentials)
        if found != self._current:
            self._current = found
        self._asked_s = self._steady_s()
        assert self._current is not None
        return self._current
