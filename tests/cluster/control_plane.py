"""A real control plane for tests: etcd, API server with RBAC and audit log, controller manager, scheduler."""

from __future__ import annotations

import base64
import json
import ssl
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import yaml

from cluster.network import NODE_IP

API_PORT = 6443
_CONTROLLERS = (
    "*,-nodeipam,-nodelifecycle,-attachdetach,-persistentvolume-binder,-persistentvolume-expander,-route,-service,"
    "-cloud-node-lifecycle"
)
_AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived", "ResponseStarted"],
    "rules": [{"level": "Metadata"}],
}


class ControlPlane:
    """Context manager. Everything it starts dies with it."""

    def __init__(self, binaries: dict[str, Path], folder: Path) -> None:
        self._binaries, self.folder = binaries, folder
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def server(self) -> str:
        return f"https://{NODE_IP}:{API_PORT}"

    @property
    def kubeconfig(self) -> Path:
        """Of an administrator."""
        return self.folder / "admin.kubeconfig"

    @property
    def audit_log(self) -> Path:
        return self.folder / "audit.log"

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._make_keys()
        (self.folder / "audit.yaml").write_text(yaml.safe_dump(_AUDIT_POLICY))
        etcd = "http://127.0.0.1:2379"
        self._start("etcd", f"--data-dir={self.folder}/etcd", f"--listen-client-urls={etcd}",
                    f"--advertise-client-urls={etcd}", "--listen-peer-urls=http://127.0.0.1:2380",
                    "--unsafe-no-fsync")  # fmt: skip
        self._start("kube-apiserver", f"--etcd-servers={etcd}", f"--bind-address={NODE_IP}",
                    f"--advertise-address={NODE_IP}", f"--secure-port={API_PORT}", "--insecure-port=0",
                    f"--cert-dir={self.folder}", "--tls-cert-file=apiserver.crt",
                    "--tls-private-key-file=apiserver.key", "--client-ca-file=ca.crt",
                    "--service-account-issuer=https://kubernetes.default.svc",
                    "--service-account-key-file=sa.pub", "--service-account-signing-key-file=sa.key",
                    "--service-cluster-ip-range=10.96.0.0/16", "--authorization-mode=RBAC",
                    "--endpoint-reconciler-type=none", f"--audit-log-path={self.audit_log}",
                    "--audit-policy-file=audit.yaml")  # fmt: skip
        self._wait_ready()
        self._start("kube-controller-manager", "--kubeconfig=manager.kubeconfig", "--port=0",
                    "--secure-port=10257", "--bind-address=127.0.0.1",
                    "--authentication-kubeconfig=manager.kubeconfig",
                    "--authorization-kubeconfig=manager.kubeconfig", "--service-account-private-key-file=sa.key",
                    "--root-ca-file=ca.crt", "--use-service-account-credentials=true", "--leader-elect=false",
                    f"--controllers={_CONTROLLERS}", "--kube-api-qps=200", "--kube-api-burst=400")  # fmt: skip
        self._start("kube-scheduler", "--kubeconfig=scheduler.kubeconfig", "--port=0", "--secure-port=10259",
                    "--bind-address=127.0.0.1", "--authentication-kubeconfig=scheduler.kubeconfig",
                    "--authorization-kubeconfig=scheduler.kubeconfig", "--leader-elect=false",
                    "--kube-api-qps=200", "--kube-api-burst=400")  # fmt: skip
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in reversed(self._processes):
            process.kill()
        for process in self._processes:
            process.wait()

    def audit(self) -> list[dict[str, Any]]:
        """All events so far; a line that is being written is left out."""
        text = self.audit_log.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def _start(self, name: str, *arguments: str) -> None:
        shim = ["setpriv", "--pdeathsig", "KILL", "--"]
        with (self.folder / f"{name}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    [*shim, str(self._binaries[name]), *arguments],
                    cwd=self.folder,
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                )
            )

    def _wait_ready(self) -> None:
        give_up_s = time.monotonic() + 90
        with self.client() as client:
            while True:
                try:
                    if client.get("/readyz").status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                dead = [process.args for process in self._processes if process.poll() is not None]
                assert not dead, f"{dead}: {(self.folder / 'kube-apiserver.log').read_text()[-2000:]}"
                assert time.monotonic() < give_up_s, "the API server is not ready"
                time.sleep(0.1)

    def client(self) -> httpx.Client:
        """HTTP client of an administrator."""
        tls = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
        tls.load_cert_chain(self.folder / "admin.crt", self.folder / "admin.key")
        return httpx.Client(base_url=self.server, verify=tls, timeout=30, trust_env=False)

    # --- keys

    def _make_keys(self) -> None:
        openssl = self._openssl
        openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout",
                "ca.key", "-out", "ca.crt", "-subj", "/CN=test-ca", "-days", "365")  # fmt: skip
        self._certificate("apiserver", "/CN=kube-apiserver",
                          f"subjectAltName=DNS:kubernetes,DNS:kubernetes.default.svc,IP:{NODE_IP}")  # fmt: skip
        for name, subject in (
            ("admin", "/O=system:masters/CN=admin"),
            ("manager", "/CN=system:kube-controller-manager"),
            ("scheduler", "/CN=system:kube-scheduler"),
        ):
            self._certificate(name, subject, "extendedKeyUsage=clientAuth")
            self._kubeconfig(name)
        openssl("genrsa", "-out", "sa.key", "2048")
        openssl("rsa", "-in", "sa.key", "-pubout", "-out", "sa.pub")

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.folder, check=True, capture_output=True)

    def _certificate(self, name: str, subject: str, extension: str) -> None:
        (self.folder / f"{name}.ext").write_text(extension + "\n")
        self._openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout",
                      f"{name}.key", "-out", f"{name}.csr", "-subj", subject)  # fmt: skip
        self._openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key",
                      "-CAcreateserial", "-days", "365", "-extfile", f"{name}.ext", "-out", f"{name}.crt")  # fmt: skip

    def _kubeconfig(self, name: str) -> None:
        def data(file: str) -> str:
            return base64.b64encode((self.folder / file).read_bytes()).decode()

        user = {"client-certificate-data": data(f"{name}.crt"), "client-key-data": data(f"{name}.key")}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {
                "server": self.server, "certificate-authority-data": data("ca.crt")}}],
            "users": [{"name": "u", "user": user}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "default"}}],
            "current-context": "x",
        }  # fmt: skip
        (self.folder / f"{name}.kubeconfig").write_text(yaml.safe_dump(config))
