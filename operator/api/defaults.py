"""What an API server does with a schema, where there is none: fill in defaults, and say what is wrong. Pure.

Used by `pdserve render`, and by the operator on objects that an older server let through.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

from pdserve.operator.api.schema_types import Schema

_PRESERVE = "x-kubernetes-preserve-unknown-fields"
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}


def with_defaults(schema: Schema, value: Any) -> Any:
    """The value, in which everything left out, or null where null means nothing, has its default."""
    if schema["type"] == "object" and isinstance(value, dict) and "properties" in schema:
        return _object_with_defaults(schema["properties"], value)
    if schema["type"] == "array" and isinstance(value, list):
        return [with_defaults(schema["items"], item) for item in value]
    return value


def _object_with_defaults(properties: dict[str, Schema], value: dict[str, Any]) -> dict[str, Any]:
    filled = {name: item for name, item in value.items() if item is not None}
    for name, schema in properties.items():
        if name not in filled and "default" in schema:
            filled[name] = copy.copy(schema["default"])
        if name in filled:
            filled[name] = with_defaults(schema, filled[name])
    return filled


def problems(schema: Schema, value: Any, path: str = "spec") -> Iterator[str]:
    """One sentence for each violation of types, limits, patterns, required and unknown fields."""
    if not _is_of_type(schema["type"], value):
        yield f"{path} must be of type {schema['type']}, not {value!r}"
    elif schema["type"] == "object":
        yield from _object_problems(schema, value, path)
    elif schema["type"] == "array":
        if not schema.get("minItems", 0) <= len(value) <= schema["maxItems"]:
            yield f"{path} must have {schema.get('minItems', 0)} to {schema['maxItems']} items"
        for index, item in enumerate(value):
            yield from problems(schema["items"], item, f"{path}[{index}]")
    else:
        yield from _scalar_problems(schema, value, path)


def _is_of_type(name: str, value: Any) -> bool:
    return isinstance(value, _TYPES[name]) and (name == "boolean" or not isinstance(value, bool))


def _object_problems(schema: Schema, value: dict[str, Any], path: str) -> Iterator[str]:
    yield from (f"{path}.{name} is required" for name in schema.get("required", []) if name not in value)
    if schema.get(_PRESERVE):
        return
    properties: dict[str, Schema] = schema.get("properties", {})
    others: Schema | None = schema.get("additionalProperties")
    for name, item in value.items():
        if name in properties:
            yield from problems(properties[name], item, f"{path}.{name}")
        elif others is not None:
            yield from problems(others, item, f"{path}.{name}")
        else:
            yield f"{path}.{name} is unknown; known are {', '.join(sorted(properties))}"


def _scalar_problems(schema: Schema, value: Any, path: str) -> Iterator[str]:
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path} must be one of {', '.join(schema['enum'])}, not {value!r}"
    if "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{path} is {value!r}, which does not look like {schema['pattern']}"
    if "minimum" in schema and not schema["minimum"] <= value <= schema["maximum"]:
        yield f"{path} must be between {schema['minimum']} and {schema['maximum']}, not {value}"
    if isinstance(value, str) and not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
        yield f"{path} must have {schema.get('minLength', 0)} to {schema.get('maxLength')} characters"
