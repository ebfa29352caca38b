"""What one pod gets from its node: a network namespace with an address, a hosts file, volumes, environment variables.

Containers see the machine's own file system with the pod's volumes mounted over it, in a mount namespace of their own;
security contexts are ignored. `/tmp` is not mounted but named by TMPDIR: a checkout may lie below it.
"""

from __future__ import annotations

import base64
import re
import shlex
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from cluster.network import BRIDGE, NODE_IP, run

Json = dict[str, Any]
Fetch = Callable[[str, str], Awaitable[Json | None]]
"""(kind, name) → object in the pod's namespace, None when there is none."""


class NotYetError(Exception):
    """Something the pod refers to does not exist; `reason` is the kubelet's."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Sandbox:
    """Network and files of one pod."""

    def __init__(self, name: str, address: str, folder: Path, models: Path | None) -> None:
        self._models = models
        self.name, self.address, self.folder = name, address, folder
        self.hosts = Path("/etc/netns") / name / "hosts"
        self._mounts: dict[str, list[tuple[str, str]]] = {}
        """Container → (host path, mount path)."""

    def open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.hosts.parent.mkdir(parents=True, exist_ok=True)
        self.hosts.write_text("127.0.0.1 localhost\n")
        link = "v" + self.name[-12:]
        run("ip", "netns", "add", self.name)
        run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        run("ip", "link", "set", link, "master", BRIDGE, "up")
        for words in (
            ["link", "set", "lo", "up"],
            ["addr", "add", f"{self.address}/16", "dev", "eth0"],
            ["link", "set", "eth0", "up"],
            ["route", "add", "default", "via", NODE_IP],
        ):
            run("ip", "-n", self.name, *words)

    def close(self) -> None:
        run("ip", "netns", "del", self.name)
        shutil.rmtree(self.hosts.parent, ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def write_hosts(self, names: dict[str, str]) -> None:
        """In place: what is bound into running containers is this very file."""
        text = "".join(f"{address} {name}\n" for name, address in sorted(names.items()))
        if not self.hosts.read_text().endswith(text):
            self.hosts.write_text(f"127.0.0.1 localhost\n{text}")

    # --- volumes

    async def fill_volumes(self, spec: Json, fetch: Fetch) -> None:
        """Make every volume's folder. Raises NotYetError."""
        folders = {volume["name"]: await self._volume(volume, fetch) for volume in spec.get("volumes", [])}
        for container in spec["containers"]:
            mounts = container.get("volumeMounts", [])
            self._mounts[container["name"]] = [(str(folders[m["name"]]), m["mountPath"]) for m in mounts]

    async def _volume(self, volume: Json, fetch: Fetch) -> Path:
        folder = self.folder / "volumes" / volume["name"]
        if "hostPath" in volume:
            return Path(volume["hostPath"]["path"])
        folder.mkdir(parents=True, exist_ok=True)
        if volume["name"] == "cache" and self._models is not None:
            # Models that this machine has converted before, as a warm cache on a node.
            (folder / "models").symlink_to(self._models)
        if "secret" in volume:
            name = volume["secret"]["secretName"]
            secret = await fetch("Secret", name)
            if secret is None:
                raise NotYetError("ContainerCreating", f'secret "{name}" not found')
            _write(folder, {key: base64.b64decode(value) for key, value in secret.get("data", {}).items()})
        elif "configMap" in volume:
            made = await fetch("ConfigMap", volume["configMap"]["name"])
            if made is None:
                raise NotYetError("ContainerCreating", f'configmap "{volume["configMap"]["name"]}" not found')
            _write(folder, {key: value.encode() for key, value in made.get("data", {}).items()})
        elif "emptyDir" not in volume:
            raise NotYetError("ContainerCreating", f"volume {volume['name']} is of no kind this node has")
        return folder

    # --- containers

    def command(self, container: Json, env: dict[str, str], words: list[str]) -> list[str]:
        """What to execute so that these words run inside the container."""
        script = ["set -e"]
        for source, target in self._mounts.get(container["name"], []):
            if target == "/tmp":
                env["TMPDIR"] = source
            else:
                script.append(_mount(source, target))
        variables = " ".join(shlex.quote(f"{name}={value}") for name, value in env.items())
        script.append(f"exec env -i {variables} {' '.join(map(shlex.quote, words))}")
        inside = ["setpriv", "--pdeathsig", "KILL", "--", "sh", "-c", "\n".join(script)]
        return ["setpriv", "--pdeathsig", "KILL", "--", "ip", "netns", "exec", self.name, *inside]

    async def environment(self, pod: Json, container: Json, base: dict[str, str], fetch: Fetch) -> dict[str, str]:
        """Variables of a container: envFrom, then env, then `$(NAME)` replaced. Raises NotYetError."""
        env = dict(base)
        for source in container.get("envFrom", []):
            name = source["configMapRef"]["name"]
            made = await fetch("ConfigMap", name)
            if made is None:
                raise NotYetError("CreateContainerConfigError", f'configmap "{name}" not found')
            env |= made.get("data", {})
        for variable in container.get("env", []):
            value = await self._value(pod, variable, fetch)
            env[variable["name"]] = expanded(value, env)
        return env

    async def _value(self, pod: Json, variable: Json, fetch: Fetch) -> str:
        source = variable.get("valueFrom")
        if source is None:
            return str(variable.get("value", ""))
        if "fieldRef" in source:
            return self._field(pod, source["fieldRef"]["fieldPath"])
        reference = source["secretKeyRef"]
        secret = await fetch("Secret", reference["name"])
        if secret is None:
            raise NotYetError("CreateContainerConfigError", f'secret "{reference["name"]}" not found')
        if reference["key"] not in secret.get("data", {}):
            message = (
                f"couldn't find key {reference['key']} in Secret {pod['metadata']['namespace']}/{reference['name']}"
            )
            raise NotYetError("CreateContainerConfigError", message)
        return base64.b64decode(secret["data"][reference["key"]]).decode()

    def _field(self, pod: Json, path: str) -> str:
        label = re.fullmatch(r"metadata\.labels\['(.+)'\]", path)
        if label:
            return str(pod["metadata"].get("labels", {}).get(label[1], ""))
        if path == "status.podIP":
            return self.address
        part, _, name = path.partition(".")
        return str(pod[part][name])


def expanded(text: str, env: dict[str, str]) -> str:
    """`$(NAME)` → its value, when there is one."""
    return re.sub(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)", lambda match: env.get(match[1], match[0]), text)


def _mount(source: str, target: str) -> str:
    """A missing mount point is made on a tmpfs over its deepest existing parent; all in the container's namespace."""
    parent = Path(target)
    while not parent.exists():
        parent = parent.parent
    over = "" if parent == Path(target) else f"mount -t tmpfs none {parent}\nmkdir -p {target}\n"
    return f"{over}mount --bind {source} {target}"


def _write(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)
