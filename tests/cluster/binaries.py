"""Finds the control plane's binaries: KUBEBUILDER_ASSETS, the cache folder, PDS_KUBE_BINARIES (unpacked into it)."""

from __future__ import annotations

import lzma
import os
import shutil
from pathlib import Path

PARTS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")


def cache_folder() -> Path:
    home = os.environ.get("PDS_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "pdserve") / "kube"


def find_control_plane() -> dict[str, Path] | str:
    """Binary by name (`etcd` and PARTS), or a sentence that says what is missing."""
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    if assets and all((Path(assets) / name).exists() for name in ("etcd", *PARTS)):
        return {name: Path(assets) / name for name in ("etcd", *PARTS)}
    kubeall = find("kubeall")
    etcd = shutil.which("etcd") or find("etcd")
    if kubeall is None:
        return "no control plane here: set KUBEBUILDER_ASSETS, or run `make kube-binaries` (6-7 minutes, once)"
    if etcd is None:
        return "no etcd here: apt-get install etcd-server"
    if shutil.which("ip") is None or os.geteuid() != 0:
        return "pods get network namespaces of their own: iproute2 and root are needed"
    # One binary is all three; which one, its name says.
    for name in PARTS:
        link = kubeall.parent / name
        if not link.exists():
            link.symlink_to(kubeall.name)
    return {"etcd": Path(etcd), **{name: kubeall.parent / name for name in PARTS}}


def find(name: str) -> Path | None:
    """One binary in the cache; unpacked into it when a packed one is found."""
    cached = cache_folder() / name
    packed_folder = os.environ.get("PDS_KUBE_BINARIES")
    packed = Path(packed_folder) / f"{name}.xz" if packed_folder else None
    if not cached.exists() and packed is not None and packed.exists():
        cached.parent.mkdir(parents=True, exist_ok=True)
        partial = cached.with_suffix(f".{os.getpid()}")
        with lzma.open(packed) as source, partial.open("wb") as target:
            shutil.copyfileobj(source, target)
        partial.chmod(0o755)
        partial.rename(cached)
    return cached if cached.exists() else None
