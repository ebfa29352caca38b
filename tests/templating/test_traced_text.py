# ruff: noqa: E501 - tables
"""Whatever a template does with a client's text, each character of it is known to be a client's."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.templating.chat_template import ChatTemplate
from pdserve.templating.traced_text import (
    CLIENT,
    TEMPLATE,
    JsonObject,
    NullText,
    TracedText,
    sources_of,
    to_json,
    trace,
)

TEXT = "Αβγ δεζ\nηθι  κλμ"
"""A client writes Greek, templates write ASCII."""

FILTERS = [
    "upper", "lower", "title", "capitalize", "trim", "trim('Α')", "string", "escape", "e", "forceescape", "safe", "indent(2)",
    "indent(2, true, true)", "replace('β', '<X>')", "replace('β', '')", "center(40)", "wordwrap(5)", "truncate(9, true)",
    "truncate(9, false, '!')", "striptags", "urlencode", "reverse", "first", "last", "list", "list | join", "list | join('-')",
    "format", "default('x')", "length", "wordcount", "tojson", "tojson(ensure_ascii=false)", "pprint", "batch(3) | list",
    "slice(3) | list", "unique | join", "sort | join", "select | join", "map('upper') | join", "random", "urlize", "int", "float",
    "items | list if false else 'x'", "xmlattr if false else 'y'", "min", "max",
]  # fmt: skip
METHODS = [
    "upper()", "lower()", "title()", "capitalize()", "casefold()", "swapcase()", "strip()", "lstrip('Α')", "rstrip()", "split()",
    "split(' ')", "split(' ', 1)", "rsplit(' ', 1)", "rsplit()", "splitlines()", "splitlines(true)", "partition('β')",
    "rpartition(' ')", "partition('nowhere')", "rpartition('nowhere')", "replace('β', 'b')", "replace('', '.')",
    "replace('γ', 'c', 1)", "removeprefix('Α')", "removesuffix('μ')", "removesuffix('')", "center(40)", "ljust(40)", "rjust(40)",
    "zfill(40)", "expandtabs()", "join(['a', 'b'])", "format(1)", "startswith('Α')", "endswith('μ')", "find('β')", "count('β')",
    "index('β')", "isalpha()", "encode('utf-8')", "translate({})",
]  # fmt: skip
EXPRESSIONS = [
    "'a' + x", "x + 'a'", "x ~ 'a'", "'a' ~ 1 ~ x", "x * 2", "2 * x", "x[1:4]", "x[::-1]", "x[0]", "x[-1]", "'[%s]' % x",
    "'[%s %s]' % (x, 'b')", "'%(k)s!' % {'k': x}", "'[%-30s]' % x", "'%s' | format(x)", "'{}-{}'.format('a', x)", "'{k}'.format(k=x)",
    "'{:>30}'.format(x)", "'{0}{0}'.format(x)", "'{k}'.format_map({'k': x})", "', '.join([x, 'b'])", "[x, 'b'] | join(';')",
    "[{'k': x}] | map(attribute='k') | join", "'aXb'.replace('X', x)", "'aXb' | replace('X', x)", "[x]", "{'k': x}", "[x] | string",
    "[x] | tojson", "{'k': [x, 1, none, true]} | tojson(indent=1)", "{x: 1} | tojson(sort_keys=true)", "x if x else 'a'", "(x, 'a')",
    "x ~ [x]", "'a' ~ {'k': x}", "('<b>' | safe) + x", "x + ('<b>' | e)", "('<b>' | safe) ~ x", "dict(k=x).k", "namespace(k=x).k",
    "cycler(x, 'b').next()", "'%d %s' % (5, x)", "['a', x] | last", "[x, 'a'] | sort | first", "x.split(' ') | join('_')",
]  # fmt: skip
BLOCKS = [
    "{% set y %}<{{ x }}>{% endset %}{{ y }}{{ y | upper }}",
    "{% macro m(v) %}<{{ v }}>{{ caller() if caller else '' }}{% endmacro %}{{ m(x) }}{% call m('a') %}{{ x }}{% endcall %}",
    "{% filter upper %}a{{ x }}{% endfilter %}",
    "{% for c in x %}{{ c }}.{% endfor %}",
    "{% for w in x.split() %}{{ loop.index }}{{ w }}{% endfor %}",
    "{% set ns = namespace(t='') %}{% for c in x %}{% set ns.t = ns.t + c %}{% endfor %}{{ ns.t }}",
    "{% with y = x[2:] %}{{ y }}{% endwith %}",
    "{% generation %}{{ x }}{% endgeneration %}",
]


def render(source: str, **variables: Any) -> str:
    return ChatTemplate(source, {}).render(variables)


def is_greek(char: str) -> bool:
    return "\u0370" <= char <= "\u03ff"


@pytest.mark.parametrize(
    "source",
    [
        *(f"{{{{ x | {name} }}}}" for name in FILTERS),
        *(f"{{{{ x.{method} }}}}" for method in METHODS),
        *(f"{{{{ {expression} }}}}" for expression in EXPRESSIONS),
        *BLOCKS,
    ],
)
def test_no_character_of_a_client_passes_for_the_templates(source: str) -> None:
    try:
        plain = render(source, x=TEXT)
    except Exception as failure:
        with pytest.raises(type(failure)):
            render(source, x=trace(TEXT))
        return
    shown = render(source, x=trace(TEXT))
    if "random" not in source:
        assert shown == plain
    assert len(sources_of(shown)) == len(shown)
    assert not [
        char for char, origin in zip(shown, sources_of(shown), strict=True) if is_greek(char) and origin == TEMPLATE
    ]


@pytest.mark.parametrize(
    "source", ["a{{ x }}b", "{{ 'a' + x ~ 'b' }}", "{{ '%s|%s' % ('a', x) }}", "{{ {'a': x} | tojson }}"]
)
def test_what_the_template_wrote_stays_the_templates(source: str) -> None:
    shown = render(source, x=trace("ΑΒ"))
    assert {char for char, origin in zip(shown, sources_of(shown), strict=True) if origin == TEMPLATE} == set(shown) - {
        "Α",
        "Β",
    }


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=12), sep=st.text(min_size=1, max_size=2), count=st.integers(-1, 3))
def test_methods_return_what_those_of_a_string_return(text: str, sep: str, count: int) -> None:
    traced = trace(text)
    for name, arguments in (
        ("split", (sep, count)), ("rsplit", (sep, count)), ("split", (None, count)), ("rsplit", (None, count)), ("splitlines", ()),
        ("splitlines", (True,)), ("strip", (sep,)), ("lstrip", ()), ("rstrip", ()), ("partition", (sep,)), ("rpartition", (sep,)),
        ("replace", (sep, "!", count)), ("removeprefix", (sep,)), ("removesuffix", (sep,)), ("join", (["a", sep],)),
    ):  # fmt: skip
        truth, found = getattr(text, name)(*arguments), getattr(traced, name)(*arguments)
        assert found == truth, name
        for piece in found if isinstance(found, list | tuple) else [found]:
            assert len(sources_of(piece)) == len(piece)


@settings(max_examples=100, deadline=None)
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=4),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    ),
    indent=st.sampled_from([None, 0, 2, "\t"]),
    ensure_ascii=st.booleans(),
    sort_keys=st.booleans(),
    separators=st.sampled_from([None, (",", ":"), ("; ", " = ")]),
)
def test_json_is_the_standard_librarys(value: Any, **options: Any) -> None:
    assert to_json(trace(value), **options) == json.dumps(value, **options)


def test_null_is_null_in_json_and_nothing_in_text() -> None:
    assert render("{{ n }}|{{ n ~ 'a' }}|{{ n | tojson }}|{{ [n] | tojson }}|{{ n is none }}|{{ n == none }}|{{ n != '' }}",
                  n=NullText()) == "|a|null|[null]|True|True|True"  # fmt: skip


def test_an_object_is_its_own_json_text() -> None:
    arguments = JsonObject(trace({"a": 1}), TracedText('{ "a": 1 }', CLIENT * 10))
    assert render("{{ o }}|{{ o.a }}|{{ 'x' + o }}|{{ o is mapping }}|{{ o | tojson }}", o=arguments) == (
        '{ "a": 1 }|1|x{ "a": 1 }|True|{"a": 1}'
    )
