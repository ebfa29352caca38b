"""Small constructors of OpenAPI v3 schema nodes, the way Kubernetes wants them. Pure; every node has a description."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

DURATION_PATTERN = r"^([0-9]+(\.[0-9]+)?(ms|s|m|h))+$"
_MAX_TEXT = 1024


class Rule(dict[str, str]):
    """A CEL rule beside its sentence; the same check for servers without CEL is in rules.py under the same message."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(rule=rule, message=message)


def node(kind: str, description: str, default: Any = None, **more: Any) -> Schema:
    """Any node; `default=None` is no default."""
    schema: Schema = {"type": kind, "description": description, **more}
    if default is not None:
        schema["default"] = default
    return schema


def text(description: str, default: str | None = None, **more: Any) -> Schema:
    """A string of bounded length (unbounded ones make CEL rules too expensive to be accepted)."""
    return node("string", description, default, **{"maxLength": _MAX_TEXT, **more})


def choice(description: str, *values: str, default: str | None = None) -> Schema:
    """One word of a closed set."""
    return node("string", description, default, enum=list(values))


def integer(description: str, default: int | None = None, *, minimum: int = 0, maximum: int = 2**31 - 1) -> Schema:
    """A whole number within limits."""
    return node("integer", description, default, minimum=minimum, maximum=maximum)


def number(description: str, default: float | None = None, *, minimum: float = 0, maximum: float = 1e12) -> Schema:
    """A number within limits, fractions included."""
    return node("number", description, default, minimum=minimum, maximum=maximum)


def switch(description: str, *, default: bool | None = None) -> Schema:
    """A boolean: true or false."""
    return node("boolean", description, default)


def duration(description: str, default: str | None = None) -> Schema:
    """A duration such as 500ms, 40s or 1m30s."""
    return node("string", description, default, pattern=DURATION_PATTERN, maxLength=32)


def array(description: str, items: Schema, *, max_items: int = 16, **more: Any) -> Schema:
    """A list of bounded length."""
    return node("array", description, items=items, maxItems=max_items, **more)


def text_map(description: str) -> Schema:
    """A map of short strings, by name."""
    values = {"type": "string", "maxLength": 256}
    return node("object", description, additionalProperties=values, maxProperties=32)


def free_form(description: str, kind: str = "object") -> Schema:
    """A type of Kubernetes (a pod template, resources, tolerations), checked by the API server when it is used."""
    return node(kind, description, **{"x-kubernetes-preserve-unknown-fields": True})


def struct(
    description: str,
    properties: dict[str, Schema],
    *,
    required: tuple[str, ...] = (),
    rules: tuple[Rule, ...] = (),
    is_defaulted: bool = False,
) -> Schema:
    """An object; `is_defaulted`: present as {} when left out, so that the defaults inside it take effect."""
    schema = node("object", description, {} if is_defaulted else None, properties=properties)
    if required:
        schema["required"] = list(required)
    if rules:
        schema["x-kubernetes-validations"] = [dict(rule) for rule in rules]
    return schema


def secret_key(description: str) -> Schema:
    """A reference to one key of a Secret in the service's namespace."""
    return struct(
        description,
        {
            "name": text("Name of the Secret.", maxLength=253, minLength=1),
            "key": text("Key in the Secret.", maxLength=253, minLength=1),
        },
        required=("name", "key"),
    )
