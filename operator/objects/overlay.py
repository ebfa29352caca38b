"""Lays a user's pod template over ours like a strategic merge patch: maps merge, named lists merge by key. Pure."""

from __future__ import annotations

from typing import Any

_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
"""List field → the key by which its items are the same; other lists are replaced."""
_APPENDED = {"tolerations", "envFrom"}


def apply_overlay(base: dict[str, Any], overlay: dict[str, Any]) -> dict[str, Any]:
    """A new template; null in the overlay removes a field."""
    merged = dict(base)
    for name, value in overlay.items():
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, dict) and isinstance(merged.get(name), dict):
            merged[name] = apply_overlay(merged[name], value)
        elif isinstance(value, list) and isinstance(merged.get(name), list):
            merged[name] = _merged_list(name, merged[name], value)
        else:
            merged[name] = value
    return merged


def _merged_list(name: str, base: list[Any], overlay: list[Any]) -> list[Any]:
    if name in _APPENDED:
        return [*base, *(item for item in overlay if item not in base)]
    key = _MERGE_KEYS.get(name)
    if key is None or not all(isinstance(item, dict) and key in item for item in overlay):
        return overlay
    merged = {item[key]: item for item in base}
    for item in overlay:
        merged[item[key]] = apply_overlay(merged.get(item[key], {}), item)
    return list(merged.values())
