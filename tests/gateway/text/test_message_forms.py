"""A template gets each message in the form that it reads, and no text of a client is lost on the way."""

from __future__ import annotations

from typing import Any

import pytest
from rendering import TOOL, USER, call, parts, reference, render

from pdserve.errors import InvalidRequestError

# --- strings or parts

PART_LOOP = """
{%- for m in messages -%}
{{- '<|im_start|>' + m['role'] + '\\n' -}}
{%- for part in m['content'] -%}
{%- if part['type'] == 'image' -%}{{- '<image>' -}}{%- elif part['type'] == 'text' -%}{{- part['text'] -}}{%- endif -%}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
FIRST_PART = """
{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' + m.content[0].text + '<|im_end|>\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
PLAIN = """
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{{ '<|im_start|>assistant\\n' }}"""
TRIMMED = PLAIN.replace("m.content", "m.content | trim")
PARTS_FOR_USERS = """
{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.role == 'user' -%}{%- for part in m.content -%}{{- part.text -}}{%- endfor -%}
{%- else -%}{{- m.content + '' -}}{%- endif -%}
{{- '<|im_end|>\\n' -}}{%- endfor -%}{{- '<|im_start|>assistant\n' -}}"""
PARTS_FOR_FIRST_SYSTEM = """
{%- if messages[0].role == 'system' -%}<|im_start|>system
{{ messages[0].content[0].text }}<|im_end|>
{% set messages = messages[1:] %}{%- endif -%}
{%- for m in messages -%}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor -%}{{- '<|im_start|>assistant\n' -}}"""
TWO_TURNS = (
    "<|im_start|>system\nAnswer in French.<|im_end|>\n<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.mark.parametrize("user_form", ["Who are you?", parts("Who are you?")], ids=["string", "parts"])
@pytest.mark.parametrize("system_form", ["Answer in French.", parts("Answer in French.")], ids=["string", "parts"])
@pytest.mark.parametrize(
    "source",
    [PART_LOOP, FIRST_PART, PLAIN, TRIMMED, PARTS_FOR_USERS, PARTS_FOR_FIRST_SYSTEM],
    ids=["part loop", "first part", "plain", "trimmed", "parts for users", "parts for the first system message"],
)
def test_every_template_gets_the_form_that_it_reads(source: str, system_form: Any, user_form: Any) -> None:
    messages = [{"role": "system", "content": system_form}, {"role": "user", "content": user_form}]
    assert render(source, messages) == TWO_TURNS


@pytest.mark.parametrize(
    ("source", "shown"),
    [(PART_LOOP, "onetwo"), (PLAIN, "one\ntwo"), (FIRST_PART, "one\ntwo"), (PARTS_FOR_USERS, "onetwo")],
    ids=["part loop", "plain", "first part", "parts for users"],
)
def test_two_parts_are_both_in_the_prompt(source: str, shown: str) -> None:
    messages = [{"role": "user", "content": parts("one", "two")}]
    assert render(source, messages) == f"<|im_start|>user\n{shown}<|im_end|>\n<|im_start|>assistant\n"


def test_an_assistants_turn_takes_the_form_that_its_template_reads() -> None:
    messages = [USER, {"role": "assistant", "content": "the answer"}, USER]
    assert "assistant\nthe answer<|im_end|>" in render(PART_LOOP, messages)


def test_a_printed_list_is_no_form_that_a_template_reads() -> None:
    shown = render("{% for m in messages %}{{ m.content }}{% endfor %}", [{"role": "user", "content": parts("hi")}])
    assert shown == "hi"


# --- a text is in the prompt, or the answer is an error


@pytest.mark.parametrize(
    ("source", "role"),
    [
        ("{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}", "tool"),
        ("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}", "system"),
        ("{{ messages[0].content }}{{ messages[1].content }}{{ messages[2].content }}", "user"),
        ("{% for m in messages %}{{ m.content if m.role != 'tool' else m.content[:3] }}{% endfor %}", "tool"),
        ("{% for m in messages %}{{ m.content if m.role != 'tool' else (m.content | length) }}{% endfor %}", "tool"),
        ("{% for m in messages %}{{ m.content | replace('file1.txt', '') }}{% endfor %}", "tool"),
    ],
    ids=["no tools", "no system", "first three", "cut", "length", "replaced"],
)
def test_a_text_that_a_template_leaves_out_is_refused_by_name(source: str, role: str) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        USER,
        TOOL,
        {"role": "user", "content": "file1.txt? brief? ls"},
    ]
    index = {"system": 0, "tool": 2, "user": 3}[role]
    with pytest.raises(
        InvalidRequestError, match=rf"messages\[{index}\] \(role {role}\).*leaves its text out"
    ) as caught:
        render(source, messages)
    assert caught.value.param == f"messages[{index}]"


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.content | tojson }}{% endfor %}",
        "{% for m in messages %}{{ m.content | tojson(ensure_ascii=True) }}{% endfor %}",
        "{% for m in messages %}{{ m.content.strip() | upper }}{% endfor %}",
        "{% for m in messages %}{{ m.content.split() | join(' ') }}{% endfor %}",
        "{% for m in messages %}{{ '%s: %s' | format(m.role, m.content) }}{% endfor %}",
        "{% for m in messages %}{{ '{}: {}'.format(m.role, m.content) }}{% endfor %}",
        "{% for m in messages %}{{ m.content | indent(2) }}{% endfor %}",
        "{% for m in messages %}{% for line in m.content.splitlines() %}> {{ line }}\n{% endfor %}{% endfor %}",
        "{% for m in messages %}{{ m.content | e }}{% endfor %}",
        "{% set x %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}{{ x | title }}",
        "{% macro show(m) %}<{{ m.content }}>{% endmacro %}{% for m in messages %}{{ show(m) }}{% endfor %}",
        "{{ messages | map(attribute='content') | join(', ') }}",
        "{% for m in messages %}{{ m.content ~ '\n' }}{% endfor %}",
        "{{ messages | tojson(indent=2) }}",
        "{% for m in messages %}{% for char in m.content %}{{ char }}.{% endfor %}{% endfor %}",
    ],
)
def test_a_text_that_a_template_changes_on_its_way_is_not_lost(source: str) -> None:
    messages = [{"role": "user", "content": ' say "hi" <b> \n né\t漢字\n'}, TOOL]
    assert render(source, messages) == reference(source, messages)


def test_history_may_be_left_out_as_templates_do() -> None:
    answer = "m.content.split('</think>')[-1]"
    source = "{% for m in messages %}{{ " + answer + " if m.role == 'assistant' else m.content }}{% endfor %}"
    messages = [USER, {"role": "assistant", "content": "<think>secret</think>done"}, USER]
    assert render(source, messages) == "run lsdonerun ls"


# --- null, absent and empty contents

DEEPSEEK_LIKE = """
{%- set ns = namespace(sys='', in_tools=false, first=true) -%}
{%- for m in messages -%}{%- if m['role'] == 'system' -%}{%- set ns.sys = m['content'] -%}{%- endif -%}{%- endfor -%}
{{- bos_token }}{{ ns.sys -}}
{%- for m in messages -%}
{%- if m['role'] == 'user' -%}{%- set ns.in_tools = false -%}{{- '<|User|>' + m['content'] -}}{%- endif -%}
{%- if m['role'] == 'assistant' and m['content'] is none -%}
{%- set ns.in_tools = false -%}
{%- for call in m['tool_calls'] -%}
{%- if loop.first -%}{{- '<|Assistant|><|calls|>' -}}{%- else -%}{{- '\\n' -}}{%- endif -%}
{{- '<|call|>' + call['type'] + '<|sep|>' + call['function']['name'] + '\\n```json\\n' + call['function']['arguments'] + '\\n```<|/call|>' -}}
{%- endfor -%}{{- '<|/calls|><|end|>' -}}
{%- endif -%}
{%- if m['role'] == 'assistant' and m['content'] is not none -%}
{%- if ns.in_tools -%}{{- '<|/outs|>' + m['content'] + '<|end|>' -}}{%- set ns.in_tools = false -%}
{%- else -%}{%- set c = m['content'] -%}{%- if '</think>' in c -%}{%- set c = c.split('</think>')[-1] -%}{%- endif -%}{{- '<|Assistant|>' + c + '<|end|>' -}}{%- endif -%}
{%- endif -%}
{%- if m['role'] == 'tool' -%}
{%- if not ns.in_tools -%}{{- '<|outs|>' -}}{%- set ns.in_tools = true -%}{%- endif -%}{{- '<|out|>' + m['content'] + '<|/out|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if ns.in_tools -%}{{- '<|/outs|>' -}}{%- endif -%}
{%- if add_generation_prompt and not ns.in_tools -%}{{- '<|Assistant|>' -}}{%- endif -%}"""  # noqa: E501
NO_STRING_ARGUMENTS = """
{%- for m in messages -%}
{%- if m['role'] == 'user' -%}{{- '<|User|>' + m['content'] -}}{%- endif -%}
{%- if m['role'] == 'assistant' and m['content'] is none -%}
{%- for call in m['tool_calls'] -%}{{- '<|call|>' + call['function']['name'] + ' ' + (call['function']['arguments'] if call['function']['arguments'] is string else call['function']['arguments'] | tojson) + '<|/call|>' -}}{%- endfor -%}
{%- elif m['role'] == 'assistant' -%}{{- '<|Assistant|>' + m['content'] + '<|end|>' -}}{%- endif -%}
{%- if m['role'] == 'tool' -%}{{- '<|out|>' + m['content'] + '<|/out|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|Assistant|>' -}}{%- endif -%}"""  # noqa: E501
SILENT = """
{%- for m in messages -%}
{{- '<|' + m.role + '|>' -}}
{%- if m.content is none -%}{%- for c in m.tool_calls -%}{{- '<call>' ~ c.function.name ~ ' ' ~ (c.function.arguments | tojson) ~ '</call>' -}}{%- endfor -%}{%- else -%}{{- m.content -}}{%- endif -%}
{%- endfor -%}"""  # noqa: E501


@pytest.mark.parametrize("absent", [False, True], ids=["null", "absent"])
@pytest.mark.parametrize(
    ("source", "arguments"),
    [(DEEPSEEK_LIKE, '{"command": "ls"}'), (NO_STRING_ARGUMENTS, {"command": "ls"}), (SILENT, {"command": "ls"})],
    ids=["deepseek-like", "arguments as text or json", "printed content"],
)
def test_a_null_content_is_none_where_a_template_asks(source: str, arguments: Any, absent: bool) -> None:
    truth = reference(source, [USER, {"role": "assistant", "content": None, "tool_calls": [call(arguments)]}, TOOL])
    assistant = {"role": "assistant", "content": None, "tool_calls": [call('{"command": "ls"}')]}
    if absent:
        del assistant["content"]
    assert render(source, [USER, assistant, TOOL]) == truth
    assert "run_shell" in truth


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}[{{ m.content }}]{% endfor %}",
        "{% for m in messages %}[{{ m['content'] + '' }}]{% endfor %}",
        "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}",
        "{% for m in messages %}[{{ m.content ~ '' }}]{% endfor %}",
        "{% for m in messages %}[{{ '%s' % m.content }}]{% endfor %}",
        "{% for m in messages %}[{% if '</think>' in m.content %}x{% else %}{{ m.content }}{% endif %}]{% endfor %}",
        "{% for m in messages %}[{{ m.content.split('</think>')[-1] }}]{% endfor %}",
        "{% for m in messages %}[{{ m.content if m.content is string else m.content[0].text }}]{% endfor %}",
        "{% for m in messages %}[{% if m.content is string %}{{ m.content }}{% elif m.content is iterable %}x{% else %}"
        "{{ raise_exception('Invalid content type') }}{% endif %}]{% endfor %}",
        "{% for m in messages %}[{% if m.content is not none and m.content != none %}{{ m.content }}{% endif %}]"
        "{% endfor %}",
        "{% for m in messages %}[{{ m.content or '' }}]{% endfor %}",
        "{% for m in messages %}[{% if m.content not in ['', none] %}{{ m.content }}{% endif %}]{% endfor %}",
        "{% for m in messages %}[{{ m['content'][0]['text'] if m.role == 'assistant' else m['content'] }}]{% endfor %}",
    ],
)
@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": []}, {"content": ""}], ids=str)
def test_null_absent_and_empty_contents_of_an_assistant_render_as_nothing(source: str, content: dict[str, Any]) -> None:
    assert render(source, [USER, {"role": "assistant", **content}, USER]) == "[run ls][][run ls]"


def test_null_fields_and_empty_calls_are_absent() -> None:
    source = (
        "{% for m in messages %}{{ m.content }}{% for name in ('tool_calls', 'name', 'refusal', 'function_call') %}"
    )
    source += "{{ name in m }} {% endfor %}{% endfor %}"
    answer = {
        "role": "assistant",
        "content": "ok",
        "tool_calls": [],
        "refusal": None,
        "function_call": None,
        "name": None,
    }
    assert render(source, [answer]) == "okFalse False False False "
