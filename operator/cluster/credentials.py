"""What a connection to the API server needs, and the interface of what provides it. How they are found: login.py."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Protocol

from pdserve.errors import PdserveError


class ClusterError(PdserveError):
    """The cluster cannot be reached, or does not answer as needed; the message says what to do."""


@dataclass(frozen=True)
class Credentials:
    """Server and identity at one moment. Certificates and key are PEM files, as an HTTP client wants them."""

    server: str
    """URL without a slash at its end."""
    namespace: str = "default"
    """The pod's own, or that of the kubeconfig's context."""
    authorization: str | None = None
    """Value of the HTTP header: scheme and token. None with a client certificate."""
    authority_file: str | None = None
    """None: the authorities that this machine trusts."""
    certificate_file: str | None = None
    key_file: str | None = None
    is_insecure: bool = False
    proxy: str | None = None

    def tls(self) -> ssl.SSLContext:
        """Context of an HTTP client. Reads files: not on an event loop."""
        context = ssl.create_default_context(cafile=self.authority_file)
        if self.is_insecure:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if self.certificate_file:
            context.load_cert_chain(self.certificate_file, self.key_file)
        return context


class Login(Protocol):
    """Credentials that stay good for as long as the process runs."""

    async def current(self) -> Credentials:
        """Credentials for the next request; the same object as before while nothing has changed.

        Raises:
            ClusterError: there are none; the message says what to set.
        """
        ...

    async def renew(self, refused: Credentials) -> Credentials:
        """Credentials read anew because the server refuses these; another object.

        Requests that are refused together read them once.

        Raises:
            ClusterError: there are none any more.
        """
        ...
