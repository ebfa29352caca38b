"""Every field of the request schemas of vLLM and of OpenAI's client is classified, and does what its class says."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import openai.types.chat.chat_completion_stream_options_param as openai_stream
import openai.types.chat.completion_create_params as openai_chat
import openai.types.completion_create_params as openai_completions
import pytest

from pdserve.errors import InvalidRequestError
from pdserve.gateway.http.body import Fields
from pdserve.gateway.openai.chat import read_chat, read_chat_options
from pdserve.gateway.openai.completions import read_completion_request
from pdserve.gateway.openai.request_fields import (
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    STREAM_OPTIONS,
    TOKENIZE,
    RequestField,
    Treatment,
)
from reference_packages import folder_of

VLLM_SCHEMAS = {
    "vllm/entrypoints/openai/chat_completion/protocol.py": {
        "ChatCompletionRequest": (CHAT,),
        "BatchChatCompletionRequest": (CHAT,),
    },
    "vllm/entrypoints/openai/completion/protocol.py": {"CompletionRequest": (COMPLETIONS,)},
    "vllm/entrypoints/serve/tokenize/protocol.py": {
        "TokenizeCompletionRequest": (TOKENIZE,),
        "TokenizeChatRequest": (TOKENIZE,),
        "DetokenizeRequest": (DETOKENIZE,),
    },
    "vllm/entrypoints/generate/base/protocol.py": {"StreamOptions": (STREAM_OPTIONS,)},
    "vllm/sampling_params.py": {"SamplingParams": (CHAT, COMPLETIONS)},
}
"""File → class → the tables that must have its fields. SamplingParams: what extra fields of requests are taken for."""
OPENAI_SCHEMAS = (
    (openai_chat.CompletionCreateParamsBase, CHAT),
    (openai_chat.CompletionCreateParamsNonStreaming, CHAT),
    (openai_chat.CompletionCreateParamsStreaming, CHAT),
    (openai_completions.CompletionCreateParamsBase, COMPLETIONS),
    (openai_completions.CompletionCreateParamsNonStreaming, COMPLETIONS),
    (openai_completions.CompletionCreateParamsStreaming, COMPLETIONS),
    (openai_stream.ChatCompletionStreamOptionsParam, STREAM_OPTIONS),
)


def fields_of_classes(source: str) -> dict[str, set[str]]:
    """Class → its annotated fields, those of bases in the same file too; neither private ones nor class variables."""
    own: dict[str, set[str]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            names = {name for base in node.bases for name in own.get(ast.unparse(base), ())}
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    is_field = "ClassVar" not in ast.unparse(line.annotation)
                    names |= {line.target.id} if is_field and not line.target.id.startswith("_") else set()
            own[node.name] = names
    return own


@pytest.mark.parametrize("file", VLLM_SCHEMAS)
def test_every_field_of_vllm_is_classified(file: str) -> None:
    found = fields_of_classes((folder_of("vllm") / file).read_text(encoding="utf-8"))
    for name, tables in VLLM_SCHEMAS[file].items():
        assert found[name], f"{file} has no class {name} with fields any more"
        for table in tables:
            assert sorted(found[name] - set(table)) == []


def test_no_other_request_class_of_vllm_asks_for_generation_here() -> None:
    """A new class of requests in the files that are read shows up."""
    known = {name for classes in VLLM_SCHEMAS.values() for name in classes}
    folder = folder_of("vllm")
    for file in VLLM_SCHEMAS:
        found = fields_of_classes((folder / file).read_text(encoding="utf-8"))
        assert {name for name in found if name.endswith("Request")} <= known


@pytest.mark.parametrize(("schema", "table"), OPENAI_SCHEMAS)
def test_every_field_of_openai_is_classified(schema: Any, table: Mapping[str, RequestField]) -> None:
    assert sorted(set(schema.__annotations__) - set(table)) == []


def test_a_new_field_of_a_package_is_noticed() -> None:
    source = "class Base:\n    a: int\nclass CompletionRequest(Base):\n    model: str = 'x'\n    new_one: int = 0\n"
    assert fields_of_classes(source)["CompletionRequest"] - set(COMPLETIONS) == {"a", "new_one"}


# --- each class behaves as it says


def chat(fields: dict[str, Any]) -> Any:
    """All that a chat's body becomes."""
    body = Fields.of({"messages": [{"role": "user", "content": "hi"}], **fields})
    options = read_chat_options(body, vocab_size=500, draw_seed=lambda: 7, has_timing_header=False)
    return read_chat(body), options


def completion(fields: dict[str, Any]) -> Any:
    """All that a completions body becomes."""
    body = Fields.of({"prompt": "hi", **fields})
    return read_completion_request(body, vocab_size=500, draw_seed=lambda: 7, has_timing_header=False)


READERS = {"chat": (chat, CHAT), "completion": (completion, COMPLETIONS)}
VALUES: tuple[Any, ...] = (True, False, 7, 0.5, "x", ["x"], [7], {"a": 1})


def named(treatment: Treatment) -> list[tuple[str, str]]:
    return [(where, name) for where, (_, table) in READERS.items() for name in table if is_a(table[name], treatment)]


def is_a(field: RequestField, treatment: Treatment) -> bool:
    return field.treatment is treatment


@pytest.mark.parametrize(("where", "name"), named(Treatment.REFUSED))
def test_a_refused_field_is_refused_with_its_value_and_accepted_where_it_asks_for_nothing(
    where: str, name: str
) -> None:
    read, table = READERS[where]
    for value in VALUES:
        if not table[name].is_neutral(value):
            with pytest.raises(InvalidRequestError) as caught:
                read({name: value})
            assert (caught.value.status, caught.value.code, caught.value.param) == (400, "not_supported", name)
            assert caught.value.message.startswith(f"{name} {value!r} is not supported: ")
    for value in (None, *table[name].neutral):
        assert read({name: value}) == read({})


@pytest.mark.parametrize(("where", "name"), named(Treatment.HARMLESS))
def test_a_harmless_field_changes_nothing(where: str, name: str) -> None:
    read, _ = READERS[where]
    assert all(read({name: value}) == read({}) for value in VALUES)


SERVED_VALUES: dict[str, Any] = {
    "n": 2, "seed": 5, "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.5, "max_tokens": 3, "min_tokens": 1,
    "repetition_penalty": 1.5, "presence_penalty": 1, "frequency_penalty": 1, "logit_bias": {"5": 1},
    "allowed_token_ids": [5], "bad_words": ["x"], "stop": "x", "stop_token_ids": [5], "ignore_eos": True,
    "include_stop_str_in_output": True, "skip_special_tokens": False, "prompt_logprobs": 1, "truncate_prompt_tokens": 5,
    "stream": True, "response_format": {"type": "json_object"}, "priority": 1, "cache_salt": "x",
    "return_token_ids": True, "return_tokens_as_token_ids": True, "max_completion_tokens": 3,
    "add_generation_prompt": False, "continue_final_message": True, "documents": [{"text": "x"}],
    "chat_template_kwargs": {"x": 1}, "reasoning_effort": "low", "prompt": "other", "echo": True, "best_of": 2,
    "add_special_tokens": False, "messages": [{"role": "user", "content": "other"}], "tool_choice": "none",
    "tools": [{"type": "function", "function": {"name": "f"}}],
}  # fmt: skip
WITH: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "truncation_side": {"truncate_prompt_tokens": 5},
    "stream_options": {"stream": True},
}
"""What a field needs beside it."""
SERVED_VALUES |= {"top_logprobs": 2, "truncation_side": "right", "stream_options": {"include_usage": True}}


def outcome(where: str, fields: dict[str, Any]) -> Any:
    """What a body becomes, or the field that it is refused for."""
    try:
        return READERS[where][0](fields)
    except InvalidRequestError as error:
        return error.param


@pytest.mark.parametrize(("where", "name"), [pair for pair in named(Treatment.SERVED) if pair[1] != "model"])
def test_a_served_field_is_read(where: str, name: str) -> None:
    """What it does is tested beside the code that does it; `model` is read before these."""
    value = (1 if where == "completion" else True) if name == "logprobs" else SERVED_VALUES[name]
    beside = WITH.get(name, {})
    assert outcome(where, {**beside, name: value}) != outcome(where, beside)


def test_stream_options_are_classified_as_they_are_read() -> None:
    for name, field in STREAM_OPTIONS.items():
        with_it, without = (chat({"stream": True, "stream_options": given}) for given in ({name: True}, {}))
        assert (with_it != without) is (field.treatment is Treatment.SERVED), name
