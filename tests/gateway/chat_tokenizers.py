"""Tokenizers and chat templates of the kinds that are in use, made at test time."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
CONTROL = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]"]
NOT_SPECIAL = ["<think>", "</think>", "<tool_call>", "<｜User｜>", "<｜Assistant｜>"]
"""Added tokens that are no special ones: some templates write them, some look for them in contents."""


def _add(tokenizer: Tokenizer, *, rstrip: bool = False) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken("<unk>", special=True, normalized=False)])
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False, rstrip=rstrip) for t in CONTROL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in NOT_SPECIAL])
    return tokenizer


def byte_level(*, rstrip: bool = False) -> Tokenizer:
    """GPT-2 style with merges across blanks and line breaks."""
    vocab = {token: n for n, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [
        ("h", "i"),
        ("Ġ", "t"),
        ("t", "h"),
        ("th", "e"),
        ("Ċ", "Ċ"),
        ("<", "|"),
        ("|", ">"),
        ("u", "s"),
        ("us", "er"),
    ]
    merges = [("e", "r"), *merges]
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _add(tokenizer, rstrip=rstrip)


def _pieces() -> list[str]:
    letters = [chr(code) for code in range(33, 127)] + ["\n", "▁"]
    return [
        "<unk>",
        "<s>",
        "</s>",
        *[f"<0x{byte:02X}>" for byte in range(256)],
        *letters,
        "▁▁",
        "hi",
        "▁hi",
        "he",
        "the",
    ]


def llama2_legacy() -> Tokenizer:
    """Each text between special tokens gets a blank in front."""
    vocab = {piece: n for n, piece in enumerate(_pieces())}
    merges = [("▁", "▁"), ("h", "i"), ("▁", "hi"), ("h", "e"), ("t", "he")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return _add(tokenizer)


def metaspace_first() -> Tokenizer:
    """Only the very beginning of a text gets a blank in front."""
    tokenizer = llama2_legacy()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def unigram() -> Tokenizer:
    """Knows `<s>` and `</s>` as words of its vocabulary: switching special tokens off does not make them text."""
    pieces = [(piece, -1.0 - 0.01 * n) for n, piece in enumerate(_pieces())]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace()
    return _add(tokenizer)


TOKENIZERS = {
    "byte_level": byte_level,
    "byte_level_rstrip": lambda: byte_level(rstrip=True),
    "llama2_legacy": llama2_legacy,
    "metaspace_first": metaspace_first,
    "unigram": unigram,
}

CHATML = """{% for message in messages %}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

TRIMMING = """{{ bos_token }}{% for message in messages -%}
{% if message['role'] == 'system' %}[INST] <<SYS>>{{ message['content'] | trim }}<</SYS>> [/INST]
{%- elif message['role'] == 'user' %}[INST] {{ message['content'].strip() }} [/INST]
{%- else %} {{ message['content'] | trim + ' ' + eos_token }}{% endif %}
{%- endfor %}"""

STRICT = """{{- bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/...') }}
    {%- endif %}
    {{- '<|im_start|>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\\n' ~ m.content | trim ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>model\\n' }}{%- endif %}"""

THINKING = """{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- set reasoning = '' %}
    {%- if message.reasoning_content is string %}{% set reasoning = message.reasoning_content %}
    {%- elif '</think>' in content %}
        {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if reasoning and loop.index0 > ns.last %}{{ '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}{% endif %}
    {{- content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

TOOLS = """{% if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{{ tools | tojson(indent=2) }}<|im_end|>
{% endif %}{% for message in messages %}
{% if message.role == 'skip' %}{% continue %}{% endif %}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% elif message.content %}
{%- for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}
{%- for call in message.tool_calls or [] -%}
<tool_call>{{ call.function.name }}: {{ call.function.arguments | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

GENERATION = """{{ strftime_now('%Y') }}{% for message in messages %}{% if message.role == 'assistant' %}
{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
{% else %}<｜User｜>{{ message.content }}<｜Assistant｜>{% endif %}{% endfor %}"""

TEMPLATES = {
    "chatml": CHATML,
    "trimming": TRIMMING,
    "strict": STRICT,
    "thinking": THINKING,
    "tools": TOOLS,
    "generation": GENERATION,
}
