"""One model's chat template: Jinja as transformers runs it, with the source of each character it writes.

The template comes from the model's files and is compiled once; the values come from clients. They are traced
(traced_text.py), so filters, calls and operators are the ones of this file where Jinja's own would lose the sources.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.tests
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from markupsafe import Markup

from pdserve.errors import ModelError
from pdserve.templating.traced_text import (
    MarkupText,
    NullText,
    TracedText,
    concat,
    escaped,
    formatted,
    inherit,
    join,
    printed,
    sources_of,
    to_json,
)

_LANGUAGE_NAMES = frozenset({"self", "loop", "caller", "varargs", "kwargs", "super"})


class RefusedByTemplateError(Exception):
    """The template called `raise_exception`: its author's own words."""


class ChatTemplate:
    """One model's compiled chat template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: variables such as bos_token and eos_token.

        Raises:
            ModelError: the source is not a Jinja template.
        """
        self._special_tokens = dict(special_tokens)
        environment = _Environment()
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the chat template does not compile: line {error.lineno}: {error.message}") from error
        constants = {node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)}
        self.literals = "\0".join(constants | {node.data for node in tree.find_all(jinja2.nodes.TemplateData)})
        """All texts that the template could write, NUL between them."""
        self.names_read = frozenset(constants | {node.attr for node in tree.find_all(jinja2.nodes.Getattr)})
        """Names of message fields and roles that the template may look for."""
        self.own_names = frozenset({*special_tokens, *environment.globals, *_LANGUAGE_NAMES})
        """Variables that are not a client's to set."""

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text of the prompt, traced.

        Raises:
            RefusedByTemplateError: the template refuses these messages.
            Exception: whatever the template's code fails with.
        """
        names = {"tools": None, "documents": None, **variables, **self._special_tokens}
        return self._template.render(names)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the model's own words for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Jinja's compiler with a `~` that keeps sources."""

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        self.write('environment.join("", (')
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write("))")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox of transformers' chat templates, traced."""

    code_generator_class = _CodeGenerator
    concat = staticmethod(concat)
    join = staticmethod(join)
    intercepted_binops = frozenset({"%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,
            finalize=printed,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        )
        self.filters = {name: _inheriting(function) for name, function in self.filters.items()}
        self.filters |= {
            "tojson": to_json,
            "join": _join,
            "format": _format,
            "string": printed,
            "indent": _indent,
            "safe": _safe,
        }
        self.filters |= dict.fromkeys(("e", "escape"), escaped)
        self.tests |= {name: _without_null(self.tests[name]) for name in ("string", "iterable", "sequence")}
        self.tests["none"] = lambda value: value is None or isinstance(value, NullText)
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.binop_table = {**self.binop_table, "%": _modulo}

    def call(self, context: jinja2.runtime.Context, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function or a method; a plain string's methods are those of a traced one."""
        owner = getattr(function, "__self__", None)
        if type(owner) is str and isinstance(function, types.BuiltinMethodType):
            function = getattr(TracedText(owner, sources_of(owner)), function.__name__)
        result = super().call(context, function, *args, **kwargs)
        return inherit(result, (owner, *args, *kwargs.values()))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The sandboxed `str.format` and `str.format_map`, traced."""
        name, text = getattr(value, "__name__", ""), getattr(value, "__self__", None)
        if name not in ("format", "format_map") or not isinstance(text, str) or not callable(value):
            return None

        def form(text: str, values: Any) -> str:
            positional, named = values
            return SandboxedFormatter(self).vformat(str.__str__(text), positional, named)

        if name == "format":
            return lambda *args, **kwargs: formatted(form, text, (args, kwargs))
        return lambda mapping: formatted(form, text, ((), dict(mapping)))


def _modulo(left: Any, right: Any) -> Any:
    return formatted(str.__mod__, left, right) if isinstance(left, str) else left % right


def _format(text: Any, *args: Any, **kwargs: Any) -> str:
    return formatted(str.__mod__, printed(text), kwargs or args)


@jinja2.pass_environment
def _join(environment: jinja2.Environment, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    items = value if attribute is None else (environment.getitem(item, attribute) for item in value)
    return join(printed(d), items)


def _safe(value: Any) -> MarkupText:
    text = printed(value)
    return MarkupText(text, sources_of(text))


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Jinja's filter of this name, which mixes traced lines with plain ones."""
    indention = " " * width if isinstance(width, int) else width
    lines = (printed(s) + "\n").splitlines()
    shown = (
        line if number == 0 or not (line or blank) else concat((indention, line)) for number, line in enumerate(lines)
    )
    return concat((indention if first else "", join("\n", shown)))


def _inheriting(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose result is traced when its inputs are."""

    def filtered(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        plain = str.__str__(result) if isinstance(result, Markup) else result
        return inherit(plain, (*args[num_first:], *kwargs.values()))

    passed = getattr(function, "jinja_pass_arg", None)
    num_first = 0 if passed is None else 1
    if passed is not None:
        filtered.jinja_pass_arg = passed  # type: ignore[attr-defined]
    return filtered


def _without_null(test: Any) -> Callable[[Any], bool]:
    return lambda value: not isinstance(value, NullText) and bool(test(value))


def _raise_exception(message: Any) -> None:
    raise RefusedByTemplateError(str.__str__(printed(message)))
