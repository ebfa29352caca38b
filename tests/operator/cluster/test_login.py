"""Ways to a cluster, each out of real files: tokens, plugins, certificates, merged files, a pod's own account."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from kubernetes.config import incluster_config

from pdserve.operator.cluster.credentials import ClusterError
from pdserve.operator.cluster.kube import Kube
from pdserve.operator.cluster.login import ClusterLogin
from pdserve.operator.handlers import make_registry

Json = dict[str, Any]

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


class Steady:
    """A clock that tests turn."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def kubeconfig(user: Json, server: str = "https://cluster.example:6443", **cluster: Any) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server} | cluster}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "shop"}}],
        "current-context": "x",
    }


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes files and names them in KUBECONFIG."""

    def write(*configs: Json) -> None:
        files = [tmp_path / f"config-{index}" for index in range(len(configs))]
        for file, config in zip(files, configs, strict=True):
            file.write_text(yaml.safe_dump(config))
        monkeypatch.setenv("KUBECONFIG", os.pathsep.join(map(str, files)))

    return write


@pytest.fixture
def clock() -> Steady:
    return Steady()


async def test_a_token_of_a_kubeconfig(use: Any) -> None:
    use(kubeconfig({"token": "abc"}, **{"insecure-skip-tls-verify": True, "proxy-url": "http://proxy:3128"}))
    found = await ClusterLogin().current()
    assert (found.server, found.namespace) == ("https://cluster.example:6443", "shop")
    assert (found.authorization, found.is_insecure, found.proxy) == ("Bearer abc", True, "http://proxy:3128")


async def test_a_proxy_of_the_environment_is_for_other_traffic(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    use(kubeconfig({"token": "abc"}))
    assert (await ClusterLogin().current()).proxy is None


async def test_a_name_and_a_password(use: Any) -> None:
    use(kubeconfig({"username": "u", "password": "p"}))
    found = await ClusterLogin().current()
    assert found.authorization == "Basic " + base64.b64encode(b"u:p").decode()


async def test_a_token_file_is_read_again_once_its_token_is_refused(use: Any, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("first\n")
    use(kubeconfig({"tokenFile": "token"}))  # relative to the kubeconfig's folder
    login = ClusterLogin()
    first = await login.current()
    assert first.authorization == "Bearer first"
    (tmp_path / "token").write_text("second\n")
    assert await login.current() is first
    renewed = await asyncio.gather(*(login.renew(first) for _ in range(3)))
    assert {found.authorization for found in renewed} == {"Bearer second"}
    assert len({id(found) for found in renewed}) == 1, "requests that are refused together read it once"


@pytest.fixture
def plugin(tmp_path: Path) -> Json:
    """An exec plugin that counts its runs, and whose tokens expire after the seconds in a file."""
    script = tmp_path / "plugin.py"
    script.write_text(
        f"""import datetime, json, os, pathlib, sys
runs = pathlib.Path({str(tmp_path / "runs")!r})
number = int(runs.read_text()) + 1 if runs.exists() else 1
runs.write_text(str(number))
lifetime_s = float(pathlib.Path({str(tmp_path / "lifetime")!r}).read_text())
if lifetime_s < 0:
    sys.exit("the login service is down")
now = datetime.datetime.now(datetime.UTC)
expires = (now + datetime.timedelta(seconds=lifetime_s)).strftime("%Y-%m-%dT%H:%M:%SZ")
info = json.loads(os.environ["KUBERNETES_EXEC_INFO"])
status = {{"token": f"{{os.environ['WHO']}}-{{number}}", "expirationTimestamp": expires}}
print(json.dumps({{"apiVersion": info["apiVersion"], "kind": "ExecCredential", "status": status}}))
"""
    )
    (tmp_path / "lifetime").write_text("3600")
    return {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": sys.executable,
            "args": [str(script)],
            "env": [{"name": "WHO", "value": "me"}],
        }
    }


async def test_an_exec_plugin_runs_again_before_its_token_expires_and_not_for_every_request(
    use: Any, plugin: Json, tmp_path: Path, clock: Steady
) -> None:
    (tmp_path / "lifetime").write_text("200")  # less than what the package keeps in reserve
    use(kubeconfig(plugin))
    login = ClusterLogin(steady_s=clock)
    first = await login.current()
    num_runs = int((tmp_path / "runs").read_text())
    assert first.authorization == f"Bearer me-{num_runs}"
    clock.now_s = 29.0
    assert await login.current() is first
    clock.now_s = 31.0
    assert (await login.current()).authorization == f"Bearer me-{num_runs + 1}"


async def test_an_exec_plugin_with_a_long_token_runs_once(use: Any, plugin: Json, clock: Steady) -> None:
    use(kubeconfig(plugin))
    login = ClusterLogin(steady_s=clock)
    found = set()
    for now_s in (0.0, 40.0, 80.0):
        clock.now_s = now_s
        found.add((await login.current()).authorization)
    assert found == {"Bearer me-1"}


async def test_a_plugin_that_fails_is_an_error_and_no_anonymous_login(use: Any, plugin: Json, tmp_path: Path) -> None:
    (tmp_path / "lifetime").write_text("-1")
    use(kubeconfig(plugin))
    with pytest.raises(ClusterError, match=r"user u of context x .* no token and no certificate.*exec plugin"):
        await ClusterLogin().current()


async def test_files_of_kubeconfig_are_merged(use: Any) -> None:
    clusters, users = kubeconfig({}), kubeconfig({"token": "from-the-second"})
    del clusters["users"], users["clusters"], users["contexts"], users["current-context"]
    use(clusters, users)
    found = await ClusterLogin().current()
    assert (found.authorization, found.namespace) == ("Bearer from-the-second", "shop")


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({}, "Expected key current-context"),
        (kubeconfig({"token": "abc"}, **{"tls-server-name": "other"}), "tls-server-name other"),
        (kubeconfig({"client-certificate": "nowhere.crt", "client-key": "nowhere.key"}), r"nowhere\.crt"),
        (kubeconfig({}), "no token and no certificate"),
    ],
)
async def test_a_kubeconfig_of_no_use_is_named_with_what_is_wrong(use: Any, config: Json, sentence: str) -> None:
    use(config)
    with pytest.raises(ClusterError, match=rf"no cluster.*config-0.*{sentence}|no cluster.*{sentence}.*set KUBECONFIG"):
        await ClusterLogin().current()


async def test_a_proxy_of_kubectl_needs_no_identity(use: Any) -> None:
    use(kubeconfig({}, server="http://127.0.0.1:8001/"))
    found = await ClusterLogin().current()
    assert (found.server, found.authorization) == ("http://127.0.0.1:8001", None)


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files and variables of a pod."""
    for name, text in (("token", "pod-1"), ("ca.crt", "…"), ("namespace", "shop\n")):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    return tmp_path


async def test_a_pod_uses_its_own_account_and_its_token_of_today(pod: Path) -> None:
    login = ClusterLogin()
    first = await login.current()
    assert (first.server, first.namespace) == ("https://[fd00::1]:443", "shop")
    assert (first.authorization, first.authority_file) == ("Bearer pod-1", str(pod / "ca.crt"))
    (pod / "token").write_text("pod-2")
    assert (await login.renew(first)).authorization == "Bearer pod-2"


async def test_kubeconfig_comes_before_the_pods_account(pod: Path, use: Any) -> None:
    use(kubeconfig({"token": "abc"}))
    assert (await ClusterLogin().current()).authorization == "Bearer abc"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, and certificates of a server and a client that it has signed."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=ca", "-days", "2")
    for name, extension in (("server", "subjectAltName=IP:127.0.0.1"), ("client", "extendedKeyUsage=clientAuth")):
        (folder / f"{name}.ext").write_text(extension)
        openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial",
                "-days", "2", "-extfile", f"{name}.ext", "-out", f"{name}.crt")  # fmt: skip
    return folder


@needs_openssl
@pytest.mark.parametrize("is_inline", [True, False])
async def test_a_client_certificate_is_shown_to_the_server(use: Any, certificates: Path, is_inline: bool) -> None:
    def part(name: str, file: str) -> Json:
        path = certificates / file
        return {f"{name}-data": base64.b64encode(path.read_bytes()).decode()} if is_inline else {name: str(path)}

    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certificates / "ca.crt"))
    tls.load_cert_chain(certificates / "server.crt", certificates / "server.key")
    tls.verify_mode = ssl.CERT_REQUIRED

    async def subject(request: web.Request) -> web.Response:
        peer = request.transport.get_extra_info("peercert") if request.transport else {}
        return web.json_response({"subject": peer["subject"]})

    app = web.Application()
    app.router.add_get("/version", subject)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    server = f"https://127.0.0.1:{runner.addresses[0][1]}"
    user = part("client-certificate", "client.crt") | part("client-key", "client.key")
    use(kubeconfig(user, server=server, **part("certificate-authority", "ca.crt")))
    kube = Kube(ClusterLogin())
    try:
        assert json.dumps((await kube.get("/version"))["subject"]) == '[[["commonName", "client"]]]'
    finally:
        await kube.close()
        await runner.cleanup()


async def test_watches_log_in_with_the_same_credentials_and_anew_when_refused(use: Any, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("first")
    use(kubeconfig({"tokenFile": "token"}))
    loop: Any = None
    registry = make_registry(loop, ClusterLogin())
    (handler,) = registry._activities.get_all_handlers()
    log_in: Any = handler.fn
    assert (await log_in()).as_http_headers() == {"Authorization": "Bearer first"}
    (tmp_path / "token").write_text("second")
    assert (await log_in()).as_http_headers() == {"Authorization": "Bearer second"}
