"""Every field has its type and range, and a wrong one is a 400 that names it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from pdserve.errors import InvalidRequestError
from pdserve.gateway.http.body import Fields
from pdserve.gateway.openai.chat import read_chat, read_chat_options
from pdserve.gateway.openai.completions import CompletionRequest, read_completion_request
from pdserve.gateway.openai.options import Options
from pdserve.gateway.text.chat_prompt import Chat

VOCAB = 500
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"prompt": "hi"}
HUGE = 10**400


@dataclass
class ChatBody:
    chat: Chat
    options: Options


def chat(**fields: Any) -> ChatBody:
    body = Fields.of({**CHAT, **fields})
    options = read_chat_options(body, vocab_size=VOCAB, draw_seed=lambda: 7, has_timing_header=False)
    return ChatBody(read_chat(body), options)


def completion(**fields: Any) -> CompletionRequest:
    body = Fields.of({**COMPLETION, **fields})
    return read_completion_request(body, vocab_size=VOCAB, draw_seed=lambda: 7, has_timing_header=False)


BAD = {
    "temperature": [-0.1, 2.1, "1", True, HUGE, [], float("inf")],
    "top_p": [0, -0.5, 1.01, "1", False],
    "top_k": [-2, 1.5, "5", True, 2**40],
    "min_p": [-0.1, 1.1, True],
    "presence_penalty": [-2.1, 2.1, "0"],
    "frequency_penalty": [-2.1, 2.1, True],
    "repetition_penalty": [0, -1, "1", HUGE],
    "max_tokens": [0, -1, 1.0, "5", True, HUGE, 10**12],
    "min_tokens": [-1, 1.5, True],
    "n": [0, -1, 129, 10**6, 1.0, True, "2"],
    "stop": ["", [""], ["a"] * 17, [1], 5, {"a": 1}, ["x" * 1025]],
    "seed": [1.5, "1", True, 2**63, -(2**63) - 1],
    "stream": ["true", 1, 0],
    "stop_token_ids": [[VOCAB], [VOCAB + 1], [-1], [2**31], [2**63], [True], [1.0], ["1"], 5, [None], [1] * 129],
    "ignore_eos": [1, "true"],
    "skip_special_tokens": ["no", 0],
    "include_stop_str_in_output": [1],
    "return_token_ids": ["x"],
    "priority": [1.5, True, 2**31],
    "cache_salt": [5, "x" * 257],
    "prompt_logprobs": [-1, 21, 1.5, True, "1", []],
    "structured_outputs": [{"regex": "a"}],
    "logit_bias": [
        {"999999": 5},
        {"-1": 5},
        {"abc": 1},
        {"1.5": 1},
        {"٣": 1},
        {" 1": 1},
        {"": 1},
        {str(VOCAB): 1},
        [1],
        "x",
        {str(n): 1 for n in range(301)},
    ],
    "stream_options": [{"include_usage": True}, {}],
    "response_format": ["text", 5],
    "model": [],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
@pytest.mark.parametrize("read", [chat, completion])
def test_a_bad_value_is_refused_by_name(read: Any, name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read(**{name: value})
    assert caught.value.status == 400
    assert caught.value.param == name
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {"5": True}}, "logit_bias.5"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": [1]}, "stream_options"),
        ({"response_format": {"type": "xml"}}, "type"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
    ],
)
@pytest.mark.parametrize("read", [chat, completion])
def test_nested_and_related_fields_are_refused_by_name(read: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read(**fields)
    assert str(caught.value.param).endswith(param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 5}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 0}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 5, "max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "<|im_end|>", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages[0].name"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
        ({"tools": []}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
    ],
)
def test_chats_own_fields_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": 10**6}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 3, "stream": True, "echo": True, "logprobs": 1}, "prompt_logprobs"),
        ({"echo": True, "logprobs": -1}, "logprobs"),
        ({"echo": True, "logprobs": 21, "max_tokens": 0}, "logprobs"),
        ({"echo": True, "logprobs": True}, "logprobs"),
        ({"echo": True, "suffix": "end"}, "suffix"),
        ({"echo": "yes"}, "echo"),
        ({"prompt_logprobs": 1, "max_tokens": 0}, "max_tokens"),
        ({"echo": 1}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [0, 5, 10**9]}, "prompt"),
        ({"prompt": [VOCAB]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True, 1]}, "prompt"),
        ({"prompt": [1.0]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [[1], [VOCAB]]}, "prompt"),
        ({"prompt": [[True]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [[[1]]]}, "prompt"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 100}, "n"),
    ],
)
def test_completions_own_fields_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize("read", [chat, completion])
def test_null_is_absent_and_unknown_fields_are_ignored(read: Any) -> None:
    nulls = dict.fromkeys([*BAD, "logprobs", "top_logprobs", "tools", "tool_choice", "suffix", "best_of", "echo"])
    noise = {"store": True, "metadata": {}, "service_tier": "x", "user": 1, "made_up": [1]}
    topology = {"kv_transfer_params": {}, "remote_host": "127.0.0.1", "bootstrap_port": 1}
    assert read(**nulls, **noise, **topology).options == read().options


def test_all_sampling_parameters_arrive() -> None:
    given = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1, "min_tokens": 2,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "seed": -3, "max_tokens": 9, "ignore_eos": True,
        "stop_token_ids": [5, 6],
    }  # fmt: skip
    sampling = chat(**given, logit_bias={"7": -100}, logprobs=True, top_logprobs=3).options.sampling
    for name, value in {**given, "stop_token_ids": (5, 6), "logit_bias": {7: -100.0}, "logprobs": 3}.items():
        assert getattr(sampling, name) == value, name


@pytest.mark.parametrize(("given", "effective"), [(-1, 0), (0, 0), (1, 1), (VOCAB - 1, VOCAB - 1), (10**7, 0)])
def test_top_k_is_off_or_inside_the_vocabulary(given: int, effective: int) -> None:
    assert chat(top_k=given).options.sampling.top_k == effective


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-7, 1e-30])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    assert chat(temperature=temperature, n=3).options.sampling.is_greedy


def test_alternatives_are_clamped_to_the_vocabulary() -> None:
    body = Fields.of({**COMPLETION, "logprobs": 20})
    request = read_completion_request(body, vocab_size=16, draw_seed=lambda: 7, has_timing_header=False)
    assert request.options.sampling.logprobs == 16


def test_a_seed_is_drawn_only_when_none_is_given() -> None:
    assert (chat().options.sampling.seed, chat(seed=0).options.sampling.seed) == (7, 0)


def test_newer_names_win() -> None:
    assert chat(max_tokens=5, max_completion_tokens=9).options.max_tokens == 9


def test_completions_default_to_16_tokens_and_chats_to_the_rest() -> None:
    assert completion().options.sampling_for(10, 100).max_tokens == 16
    assert chat().options.sampling_for(10, 100).max_tokens == 90


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "param"), [(90, 11, "max_tokens"), (100, None, "prompt"), (101, None, "prompt")]
)
def test_what_never_fits_is_refused_with_the_three_numbers(num_prompt: int, max_tokens: int | None, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(max_tokens=max_tokens).options.sampling_for(num_prompt, 100)
    assert caught.value.param == param
    assert caught.value.code == "context_length_exceeded"
    for number in (100, num_prompt, max_tokens or 1):
        assert str(number) in caught.value.message


def test_min_tokens_must_fit_into_the_default_limit_too() -> None:
    with pytest.raises(InvalidRequestError, match="min_tokens"):
        completion(min_tokens=17).options.sampling_for(10, 100)


def test_continuing_switches_the_generation_prompt_off_by_itself() -> None:
    assert not chat(continue_final_message=True).chat.add_generation_prompt


@pytest.mark.parametrize("arguments", ['{"x": [1]}', {"x": [1]}, "{broken", None])
def test_tool_arguments_are_kept_as_they_were_sent(arguments: object) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    (message,) = chat(messages=[{"role": "assistant", "content": None, "tool_calls": [call]}]).chat.messages
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": arguments}


def test_an_empty_list_is_a_null_content_of_an_assistant() -> None:
    (message,) = chat(messages=[{"role": "assistant", "content": []}]).chat.messages
    assert message["content"] is None


def test_reasoning_effort_is_given_once() -> None:
    twice = {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}
    with pytest.raises(InvalidRequestError, match="choose one"):
        chat(messages=[{"role": "user", "content": "hi"}], **twice)


def test_tools_that_may_not_be_called_are_left_out() -> None:
    assert chat(tools=[{"type": "function"}], tool_choice="none").chat.tools is None


def test_prompts_are_texts_or_ids_one_or_several() -> None:
    assert completion(prompt="a").prompts == ["a"]
    assert completion(prompt=["a", "b"]).prompts == ["a", "b"]
    assert completion(prompt=[1, 2]).prompts == [[1, 2]]
    assert completion(prompt=[[1], [2, 3]]).prompts == [[1], [2, 3]]


def test_only_echo_may_generate_nothing() -> None:
    assert completion(echo=True, max_tokens=0).needs_no_worker
    assert not completion(echo=True, max_tokens=0, logprobs=0).needs_no_worker
    assert not completion(echo=True, max_tokens=0, prompt_logprobs=0).needs_no_worker


@pytest.mark.parametrize(("fields", "scored", "shown"), [
    ({"echo": True}, None, None),
    ({"logprobs": 3}, None, None),
    ({"echo": True, "logprobs": 3}, 3, 3),
    ({"echo": True, "logprobs": 0, "max_tokens": 0}, 0, 0),
    ({"prompt_logprobs": 0}, 0, 0),
    ({"prompt_logprobs": 20, "logprobs": 3}, 20, 20),
    ({"echo": True, "logprobs": 5, "prompt_logprobs": 2}, 5, 2),
    ({"echo": True, "logprobs": 2, "prompt_logprobs": 5}, 5, 5),
])  # fmt: skip
def test_prompts_are_scored_for_echo_with_logprobs_and_for_prompt_logprobs(
    fields: dict[str, Any], scored: int | None, shown: int | None
) -> None:
    request = completion(**fields)
    assert request.options.sampling.prompt_logprobs == scored
    assert request.num_prompt_logprobs == shown


def test_a_chat_may_ask_for_its_prompts_log_probabilities() -> None:
    assert chat(prompt_logprobs=4).options.sampling.prompt_logprobs == 4
    assert chat().options.sampling.prompt_logprobs is None
