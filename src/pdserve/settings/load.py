"""Read a process's settings from flags, environment, YAML file and defaults, in this order of precedence.

Every complaint is a SettingError that names the setting, the value and what was expected; an unknown name
comes with the known ones that look like it. The environment and the file may name settings of other
processes (they are shared); flags may not. An empty environment variable counts as unset.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from pdserve.errors import SettingError
from pdserve.settings.field import Setting, settings_of
from pdserve.settings.kinds import boolean, is_boolean_word
from pdserve.settings.roles import ENVIRONMENT_ONLY, ROLES
from pdserve.settings.shared import SharedSettings

T = TypeVar("T", bound=SharedSettings)

_PREFIX = "PDS_"
_SECRET_NAME = re.compile(r"PASSWORD|PASSWD|SECRET|TOKEN|API_KEY|CREDENTIAL")
"""A name that is unknown here and looks like this may carry a secret, and complaints end in logs."""


class _Found(NamedTuple):
    """A value before it is cast, and the source that it comes from."""

    value: object
    origin: str


def load(
    cls: type[T],
    argv: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    defaults: Mapping[str, object] | None = None,
) -> T:
    """The settings of one process.

    Args:
        cls: GatewaySettings, PrefillSettings, DecodeSettings, or a class of the same kind.
        argv: flags, without the command's own name. `--help` prints the settings and exits.
        env: usually `os.environ`.
        defaults: replaces defaults, by name in any case; the weakest source.

    Raises:
        SettingError: an unknown name, or a bad value.
    """
    values, _ = _resolve(cls, argv, env or {}, defaults or {})
    return cls(**{name.lower(): value for name, value in values.items()})


def describe(
    cls: type[SharedSettings],
    argv: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    defaults: Mapping[str, object] | None = None,
) -> list[dict[str, object]]:
    """Every setting of a process, for `pdserve config --json`. A password in a URL is not shown, nor in complaints."""
    values, origins = _resolve(cls, argv, env or {}, defaults or {})
    return [
        {
            "name": name,
            "value": _without_password(values[name]),
            "default": field.default,
            "unit": about.unit,
            "origin": origins[name],
            "help": about.help,
            "why": about.why,
            "expected": about.kind.expected,
        }
        for name, (field, about) in settings_of(cls).items()
    ]


def known_names() -> frozenset[str]:
    """Every name that the environment (after `PDS_`) and the file may carry."""
    return frozenset(name for cls in ROLES.values() for name in settings_of(cls)) | ENVIRONMENT_ONLY.keys()


def help_text(cls: type[SharedSettings]) -> str:
    """The text that `--help` prints: every flag with its help and default."""
    lines = [f"  --config FILE\n      Settings as YAML. Any flag below is also {_PREFIX}<NAME> in the environment."]
    refused: list[str] = []
    for name, (field, about) in settings_of(cls).items():
        if about.is_refused:
            refused.append(_flag(name))
            continue
        unit = f" {about.unit}" if about.unit and field.default is not None else ""
        default = f"Default {shown(field.default)}{unit}: {about.why}"
        lines.append(f"  {_flag(name)} ({about.kind.expected})\n      {about.help} {default}")
    if refused:
        lines.append(f"  Known, and refused because this version does not support them: {', '.join(refused)}")
    return "\n".join(lines)


def _without_password(value: object) -> object:
    return re.sub(r"(:/*[^:/@]*:).*@", r"\1***@", value, flags=re.DOTALL) if isinstance(value, str) else value


def shown(value: object) -> str:
    """A value as flags, environment and file spell it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)


def _flag(name: str) -> str:
    return "--" + name.lower().replace("_", "-")


def _name(key: str) -> str:
    return key.strip().replace("-", "_").upper()


def _resolve(
    cls: type[SharedSettings], argv: Sequence[str], env: Mapping[str, str], defaults: Mapping[str, object]
) -> tuple[dict[str, Any], dict[str, str]]:
    known = settings_of(cls)
    flags = dict(_from_flags(cls, argv))
    environment = dict(_from_environment(known, env))
    config = flags.pop("CONFIG", environment.pop("CONFIG", None))
    file = _from_file(known, str(config.value)) if config else {}
    given = _from_mapping(known, defaults, "default of the command")
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, (field, about) in known.items():
        found = flags.get(name) or environment.get(name) or file.get(name) or given.get(name)
        values[name] = _cast(name, found.value, about) if found else field.default
        origins[name] = found.origin if found else "default"
    for name, (_, about) in known.items():
        if about.derive is not None and origins[name] == "default":
            values[name] = about.derive(values)
    return values, origins


def _cast(name: str, value: object, about: Setting) -> object:
    try:
        return about.kind.parse(shown(value))
    except ValueError:
        raise SettingError(name, _without_password(value), about.kind.expected) from None


def _from_flags(cls: type[SharedSettings], argv: Sequence[str]) -> Iterator[tuple[str, _Found]]:
    known = settings_of(cls)
    words = list(argv)
    while words:
        word = words.pop(0)
        if word in ("-h", "--help"):
            print(help_text(cls))
            raise SystemExit(0)
        if not word.startswith("--"):
            raise SettingError(word, word, "a flag that starts with --")
        key, equals, value = word.removeprefix("--").partition("=")
        name = _name(key)
        is_boolean = name in known and known[name][1].kind is boolean
        if name.startswith("NO_") and name.removeprefix("NO_") in known and not equals:
            name, value = name.removeprefix("NO_"), "off"
        elif name not in known and name != "CONFIG":
            raise SettingError(f"--{key}", value or None, _instead_of(name, known))
        elif is_boolean and not equals:
            value = words.pop(0) if words and is_boolean_word(words[0]) else "on"
        elif not equals:
            if not words:
                raise SettingError(name, None, f"a value after {word}")
            value = words.pop(0)
        yield name, _Found(value, f"flag {_flag(name)}")


def _from_environment(known: Mapping[str, object], env: Mapping[str, str]) -> Iterator[tuple[str, _Found]]:
    acceptable = known_names() | known.keys()
    for variable in sorted(env):
        if variable.startswith(_PREFIX):
            name = variable.removeprefix(_PREFIX)
            if name not in acceptable:
                value = "***" if _SECRET_NAME.search(variable) else _without_password(env[variable])
                raise SettingError(variable, value, _known_like(name, acceptable, _PREFIX.__add__))
            if env[variable].strip():
                yield name, _Found(env[variable], f"environment {variable}")


def _from_file(known: Mapping[str, object], path: str) -> dict[str, _Found]:
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError("CONFIG", path, f"a YAML file that can be read ({error.strerror})") from error
    except yaml.YAMLError as error:
        raise SettingError("CONFIG", path, f"valid YAML ({error})") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingError("CONFIG", path, "a YAML mapping of setting names to values")
    return _from_mapping(known, {str(key): value for key, value in content.items()}, f"file {path}")


def _from_mapping(known: Mapping[str, object], mapping: Mapping[str, object], origin: str) -> dict[str, _Found]:
    acceptable = known_names() | known.keys()
    found: dict[str, _Found] = {}
    for key, value in mapping.items():
        name = _name(key)
        if name not in acceptable:
            raise SettingError(key, value, f"{_known_like(name, acceptable, str)} ({origin})")
        if isinstance(value, (dict, list)):
            raise SettingError(name, value, f"a single value ({origin})")
        if value is not None:
            found[name] = _Found(value, origin)
    return found


def _instead_of(name: str, known: Mapping[str, object]) -> str:
    """What was expected instead of a flag that this process does not have."""
    roles = [role for role, cls in ROLES.items() if name.removeprefix("NO_") in settings_of(cls)]
    if roles:
        return f"a flag of this process, and that is one of {' and '.join(roles)} alone"
    return _known_like(name, [*known, "CONFIG"], _flag)


def _known_like(name: str, known: Any, spell: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    if not close:
        return "a known setting; `pdserve config` lists them"
    return "a known setting, for example " + " or ".join(spell(match) for match in close)
