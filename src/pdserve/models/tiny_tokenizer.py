"""The tokenizer of tiny models: byte-level BPE with ChatML special tokens, the same for every seed. Torch-free.

Every text round-trips (the alphabet is the 256 bytes), common words are one token, and anything else falls
apart into bytes: one emoji is four tokens, as in large vocabularies' rare characters.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
"""Ids 0, 1, 2. TURN_END is the tokenizer's eos token; END_OF_TEXT ends a sequence too (generation_config)."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_WORDS = """the of and to in is you that it he was for on are as with his they be at have this from by not but what
all were when we there can an your which their said will each about how up out them user assistant system token
block cache"""


def build_tokenizer() -> Tokenizer:
    """Special tokens, then 256 bytes, then what it takes to make one token of each common word, with and without
    a leading blank."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    ranks: dict[tuple[str, str], int] = {}
    for word in _WORDS.split():
        for text in (word, "Ġ" + word):
            first, *others = _pieces(text, ranks)
            for other in others:
                ranks[first, other] = len(ranks)
                first += other
                vocab.setdefault(first, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(ranks)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def _pieces(text: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    """What BPE makes of a word so far: always the merge of lowest rank first."""
    pieces = list(text)
    while found := [(ranks[pair], index) for index, pair in enumerate(pairwise(pieces)) if pair in ranks]:
        _, index = min(found)
        pieces[index : index + 2] = [pieces[index] + pieces[index + 1]]
    return pieces


def write_tokenizer(folder: Path, max_model_len: int) -> int:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja; returns the vocabulary's size.

    The files are written here and not by `save_pretrained`, whose tokenizer class only transformers 5 knows.
    """
    tokenizer = build_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": max_model_len,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return tokenizer.get_vocab_size()
