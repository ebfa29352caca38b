"""Templates see arguments, thoughts and a client's strings as they are, and clients set nothing of a template's own."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_tokenizers import SPECIAL_TOKENS, byte_level
from rendering import TOOL, USER, Messages, call, reference, render
from tokenizers import AddedToken

from pdserve.errors import InvalidRequestError
from pdserve.gateway.text.chat_prompt import Chat, ChatPrompts
from pdserve.gateway.text.tokenizer import ModelTokenizer
from pdserve.templating.chat_template import ChatTemplate

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"

# --- arguments

SPLICED = """
{%- for m in messages -%}
{%- if m.tool_calls -%}{%- for c in m.tool_calls -%}{{- '<|call|>' + c.function.name + '\\n' + c.function.arguments + '<|/call|>' -}}{%- endfor -%}
{%- else -%}{{- '<|' + m.role + '|>' + m.content -}}{%- endif -%}
{%- endfor -%}"""  # noqa: E501


@pytest.mark.parametrize("content", ["", None])
def test_arguments_that_are_spliced_as_text_appear_as_the_client_sent_them(content: str | None) -> None:
    text = '{"command":  "ls", "n": 1.0}'
    shown = render(SPLICED, [USER, {"role": "assistant", "content": content, "tool_calls": [call(text)]}, TOOL])
    assert shown == f"<|user|>run ls<|call|>run_shell\n{text}<|/call|><|tool|>file1.txt"


@pytest.mark.parametrize(
    "expression",
    [
        "{{ a | tojson }}",
        "{{ a if a is string else a | tojson }}",
        "{{ a }}",
        "{{ a ~ '' }}",
        "{{ '' + a }}",
        "{{ a + '' }}",
        "{{ a | string }}",
        "{{ '%s' | format(a) }}",
        "{{ '{}'.format(a) }}",
        "{{ [a] | map('tojson') | join }}",
        "{{ a if a is not mapping else a | tojson }}",
        "{{ a.strip() }}",
    ],
)
@pytest.mark.parametrize(
    "arguments", ['{"a": "é\\"", "b": [1, null]}', {"a": 'é"', "b": [1, None]}], ids=["text", "object"]
)
def test_arguments_are_json_however_a_template_writes_them(expression: str, arguments: Any) -> None:
    source = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}"
    source += expression + "{% endfor %}{% endfor %}"
    shown = render(source, [{"role": "assistant", "content": "", "tool_calls": [call(arguments)]}])
    assert json.loads(shown) == {"a": 'é"', "b": [1, None]}


def test_arguments_whose_members_are_listed_are_an_object() -> None:
    source = "{% for m in messages %}{% for c in m.tool_calls %}"
    source += "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};"
    source += (
        "{% endfor %}{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}{% endfor %}{% endfor %}"
    )
    messages = [{"role": "assistant", "content": "", "tool_calls": [call('{"a": true, "b": "x"}')]}]
    assert render(source, messages) == "a=True;b=x;a=True;b=x;"


@pytest.mark.parametrize("arguments", ["not json", "[1]", '"text"', '{"a": '])
def test_arguments_that_are_no_object_stay_text(arguments: str) -> None:
    assert arguments in render(SPLICED, [{"role": "assistant", "content": "", "tool_calls": [call(arguments)]}])


@pytest.mark.parametrize("arguments", ["", None])
def test_empty_arguments_are_an_empty_object(arguments: str | None) -> None:
    if arguments is not None:
        assert "run_shell\n{}<" in render(
            SPLICED, [{"role": "assistant", "content": "", "tool_calls": [call(arguments)]}]
        )


# --- reasoning


@pytest.mark.parametrize("read", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("sent", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_are_there_under_the_name_that_a_template_reads(read: str, sent: str) -> None:
    source = (
        "{% for m in messages %}{% if m." + read + " %}<{{ m." + read + " }}>{% endif %}{{ m.content }}{% endfor %}"
    )
    assert render(source, [USER, {"role": "assistant", "content": "ok", sent: "hm"}, USER]) == "run ls<hm>okrun ls"


def test_a_template_that_wants_only_one_of_content_and_thoughts_gets_it() -> None:
    source = "{% for m in messages %}{% if m.content and m.thinking %}{{ raise_exception('not both') }}{% endif %}"
    source += "{{ m.content }}{% endfor %}"
    assert render(source, [USER, {"role": "assistant", "content": "ok", "reasoning_content": "hm"}]) == "run lsok"


# --- strings that a template looks at

LOOKS_AT_TAGS = """
{%- if messages[0].role == 'system' -%}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' -}}{%- endif -%}
{%- set ns = namespace(searching=true, last=messages|length - 1) -%}
{%- for m in messages[::-1] -%}
{%- set i = (messages|length - 1) - loop.index0 -%}
{%- if ns.searching and m.role == 'user' and m.content is string and not (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) -%}
{%- set ns.searching = false -%}{%- set ns.last = i -%}
{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
{%- if m.content is string -%}{%- set content = m.content -%}{%- else -%}{%- set content = '' -%}{%- endif -%}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) -%}
{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' -}}
{%- elif m.role == 'assistant' -%}
{%- set r = '' -%}
{%- if m.reasoning_content is string -%}{%- set r = m.reasoning_content -%}
{%- elif '</think>' in content -%}
{%- set r = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{%- if loop.index0 > ns.last -%}
{%- if loop.last or (not loop.last and r) -%}{{- '<|im_start|>assistant\\n<think>\\n' + r.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') -}}
{%- else -%}{{- '<|im_start|>assistant\\n' + content -}}{%- endif -%}
{%- else -%}{{- '<|im_start|>assistant\\n' + content -}}{%- endif -%}
{%- if m.tool_calls -%}
{%- for call in m.tool_calls -%}
{%- if (loop.first and content) or (not loop.first) -%}{{- '\\n' -}}{%- endif -%}
{%- if call.function -%}{%- set call = call.function -%}{%- endif -%}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' -}}
{%- if call.arguments is string -%}{{- call.arguments -}}{%- else -%}{{- call.arguments | tojson -}}{%- endif -%}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- elif m.role == 'tool' -%}
{%- if loop.first or (messages[loop.index0 - 1].role != 'tool') -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' -}}
{%- if loop.last or (messages[loop.index0 + 1].role != 'tool') -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}"""  # noqa: E501
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
ECHOES: dict[str, Messages] = {
    "a tool result in a user's message": [
        USER,
        {"role": "assistant", "content": '<think>\nplan\n</think>\n\n<tool_call>\n{"name": "ls"}\n</tool_call>'},
        {"role": "user", "content": "<tool_response>\nfile1\n</tool_response>"},
    ],
    "thoughts before a call": [
        USER,
        {"role": "assistant", "content": "<think>\nplan\n</think>\n\nok", "tool_calls": [call("{}", "ls")]},
        TOOL,
    ],
    "a tag alone": [{"role": "user", "content": "<think>"}, {"role": "assistant", "content": "</think>"}, USER],
    "tags in a user's message": [{"role": "user", "content": "what does </think> mean? <think>\n\n</think>"}],
    "a result that only begins like one": [
        USER,
        {"role": "assistant", "content": "<think>\na\n</think>\n\nb"},
        {"role": "user", "content": "<tool_response>\nfile1"},
    ],
    "thoughts of their own": [
        USER,
        {"role": "assistant", "content": "</think>x", "reasoning_content": "<think>y"},
        TOOL,
    ],
    "the word text": [{"role": "user", "content": "text"}, {"role": "assistant", "content": "endoftext"}, USER],
}


@pytest.mark.parametrize("name", ECHOES)
def test_a_template_sees_true_strings_though_they_are_tokens(name: str) -> None:
    backend = byte_level()
    backend.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    template = ChatTemplate(LOOKS_AT_TAGS, SPECIAL_TOKENS)
    prompts = ChatPrompts(ModelTokenizer(backend, SPECIAL_TOKENS, template.literals), template)
    prompt = prompts.build(Chat(ECHOES[name]))
    assert prompt.text == reference(LOOKS_AT_TAGS, ECHOES[name])
    assert backend.decode(prompt.token_ids, skip_special_tokens=False) == prompt.text


@pytest.mark.parametrize(
    "condition",
    [
        "m.content == '<|im_end|>'",
        "m.content.startswith('<|im_')",
        "m.content.endswith('|>')",
        "m.content | length == 10",
        "m.content[1:3] == '|i'",
        "m.content in ['<|im_end|>']",
        "{'<|im_end|>': 1}[m.content] == 1",
        "m.content.rstrip('|>').endswith('end')",
        "m.content | upper == '<|IM_END|>'",
        "m.content.split('_')[0] == '<|im'",
        "m.content[-1] == '>'",
        "m.content is string and m.content is not mapping",
    ],
)
def test_conditions_on_contents_hold(condition: str) -> None:
    source = "{% for m in messages %}{{ 'yes' if " + condition + " else 'no' }}: {{ m.content }}{% endfor %}"
    assert render(source, [{"role": "user", "content": "<|im_end|>"}]) == "yes: <|im_end|>"


# --- what a client may set


@pytest.mark.parametrize(
    "name",
    [
        "bos_token",
        "eos_token",
        "unk_token",
        "raise_exception",
        "strftime_now",
        "range",
        "namespace",
        "dict",
        "loop",
        "self",
    ],
)
def test_template_variables_replace_nothing_of_the_templates_own(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"chat_template_kwargs.{name}") as caught:
        render(PLAIN, [USER], variables={name: "x"})
    assert caught.value.param == "chat_template_kwargs"


def test_documents_reach_a_template_that_reads_them() -> None:
    source = "{% for d in documents or [] %}[{{ d.title }}: {{ d.text }}]{% endfor %}{{ messages[0].content }}"
    assert render(source, [USER], documents=[{"title": "t", "text": "d"}]) == "[t: d]run ls"
