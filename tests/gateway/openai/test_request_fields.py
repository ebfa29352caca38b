"""Every field of the request schemas of vLLM and of OpenAI's client is classified, and does what its class says."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import openai.types.chat.chat_completion_stream_options_param as openai_stream
import openai.types.chat.completion_create_params as openai_chat
import openai.types.completion_create_params as openai_completions
import pytest
from reference_packages import folder_of
from stand_in import running

from pdserve.errors import InvalidRequestError
from pdserve.gateway.http.body import Fields
from pdserve.gateway.openai.chat import read_chat, read_chat_options
from pdserve.gateway.openai.completions import read_completion_request
from pdserve.gateway.openai.request_fields import (
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    STREAM_OPTIONS,
    TABLES,
    TOKENIZE,
    RequestField,
    Treatment,
)

VLLM_SCHEMAS = {
    "vllm/entrypoints/openai/chat_completion/protocol.py": {"ChatCompletionRequest": (CHAT,)},
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
        assert {name for name in found if name.endswith("Request")} <= known | {"BatchChatCompletionRequest"}


@pytest.mark.parametrize(("schema", "table"), OPENAI_SCHEMAS)
def test_every_field_of_openai_is_classified(schema: Any, table: Mapping[str, RequestField]) -> None:
    assert sorted(set(schema.__annotations__) - set(table)) == []


def test_a_new_field_of_a_package_is_noticed() -> None:
    source = "class Base:\n    a: int\nclass CompletionRequest(Base):\n    model: str = 'x'\n    new_one: int | None = None\n"
    assert fields_of_classes(source)["CompletionRequest"] - set(COMPLETIONS) == {"a", "new_one"}
