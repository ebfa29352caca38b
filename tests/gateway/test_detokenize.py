"""Streams of tokens become exactly the text that the tokenizer's own decode makes of all of them."""

from __future__ import annotations

import itertools
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from pdserve.gateway.detokenize import Detokenizer
from pdserve.gateway.text.tokenizer import REPLACEMENT

CORPUS = [
    "the quick brown fox",
    "ein Fuchs läuft über 雪 und Eis",
    "שלום עולם",
    "👩‍👩‍👧‍👦 family",
    "    indented .",
    "0123456789",
]
HARD_TEXTS = [
    "👩‍👩‍👧‍👦👍🏽 done",
    "漢字かな交じり文、한국어",
    "مرحبا بالعالم",
    "a    b        c",
    "    .",
    "e\u0301 combining n\u0303",
    " leading and trailing ",
    "tab\tnew\nline\r\n",
    "real \ufffd replacement",
    "\ufffd",
]


def byte_level() -> Tokenizer:
    vocab = {token: n for n, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "t"), ("Ġ", "Ġ"), ("ĠĠ", "Ġ"), ("Ċ", "Ċ"), ("Ġ", "a")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<s>"])
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("日本", special=False)])
    return tokenizer


def _pieces_vocab() -> dict[str, int]:
    pieces = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    pieces += ["▁", "▁▁", *sorted({c for text in CORPUS for c in text if ord(c) < 0x3000 and not c.isspace()})]
    pieces += ["th", "▁th", "▁the"]
    return {piece: n for n, piece in enumerate(pieces)}


def llama2() -> Tokenizer:
    merges = [("▁", "▁"), ("t", "h"), ("▁", "th"), ("▁th", "e")]
    tokenizer = Tokenizer(models.BPE(vocab=_pieces_vocab(), merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def gemma() -> Tokenizer:
    tokenizer = llama2()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = llama2()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


def word_piece() -> Tokenizer:
    vocab = {token: n for n, token in enumerate(["[UNK]", "a", "b", "##b", "##c", "hello", "."])}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


TOKENIZERS = {"byte_level": byte_level(), "llama2": llama2(), "gemma": gemma(), "metaspace": metaspace()}
by_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)


def stream(tokenizer: Tokenizer, ids: list[int], cuts: list[int] | None = None, **options: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    chunks = [[token_id] for token_id in ids]
    if cuts is not None:
        edges = sorted({0, len(ids), *[cut % (len(ids) + 1) for cut in cuts]})
        chunks = [ids[start:end] for start, end in itertools.pairwise(edges)]
    return [*[detokenizer.push(chunk) for chunk in chunks], detokenizer.finish()]


@by_tokenizer
@pytest.mark.parametrize("text", HARD_TEXTS)
def test_hard_texts_come_out_whole(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text).ids
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if name != "metaspace":
        assert "".join(pieces) == text
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(max_size=40), cuts=st.lists(st.integers(0, 200), max_size=8), name=st.sampled_from(sorted(TOKENIZERS))
)
def test_any_text_in_any_pieces_equals_decode(text: str, cuts: list[int], name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text).ids
    assert "".join(stream(tokenizer, ids, cuts)) == tokenizer.decode(ids)


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.integers(0, TOKENIZERS["byte_level"].get_vocab_size() + 2), max_size=30),
    cuts=st.lists(st.integers(0, 200), max_size=8),
    skip=st.booleans(),
)
def test_any_byte_level_ids_equal_decode_even_when_they_are_no_text(
    ids: list[int], cuts: list[int], skip: bool
) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(tokenizer, ids, cuts, skip_special_tokens=skip)) == expected


def _decode_bytes_run_by_run(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Truth for SentencePiece: text of the pieces, each run of byte tokens decoded by Python's UTF-8 decoder."""
    data = b""
    for token_id in ids:
        piece = tokenizer.id_to_token(token_id)
        assert piece is not None
        is_byte = re.fullmatch(r"<0x([0-9A-F]{2})>", piece)
        data += bytes([int(is_byte[1], 16)]) if is_byte else piece.replace("▁", " ").encode()
    return data.decode("utf-8", "replace")


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(3, TOKENIZERS["gemma"].get_vocab_size() - 1), max_size=30))
def test_cut_byte_fallback_runs_keep_their_complete_characters(ids: list[int]) -> None:
    tokenizer = TOKENIZERS["gemma"]
    assert "".join(stream(tokenizer, ids)) == _decode_bytes_run_by_run(tokenizer, ids)


@by_tokenizer
def test_a_character_cut_at_the_end_leaves_one_replacement_at_the_end_only(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("ok 👍").ids
    for num_cut in (1, 2, 3):
        pieces = stream(tokenizer, ids[:-num_cut])
        assert "".join(pieces) == "ok " + REPLACEMENT
        assert not any(REPLACEMENT in piece for piece in pieces[:-1])


def test_a_character_is_released_by_its_last_token() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("雪!").ids
    assert stream(tokenizer, ids) == ["", "", "雪", "!", ""]


def test_a_continuation_keeps_the_blank_that_a_beginning_drops() -> None:
    tokenizer = TOKENIZERS["llama2"]
    ids = tokenizer.encode("the fox").ids
    assert "".join(stream(tokenizer, ids)) == "the fox"
    assert "".join(stream(tokenizer, ids, continues=True)) == " the fox"


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_shown_only_on_request(skip: bool) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = [*tokenizer.encode("a<tool>").ids, tokenizer.token_to_id("<|end|>")]
    assert "".join(stream(tokenizer, ids, skip_special_tokens=skip)) == ("a<tool>" if skip else "a<tool><|end|>")


def test_other_decoders_stream_through_the_tokenizer_itself() -> None:
    tokenizer = word_piece()
    ids = tokenizer.encode("hello abc hello .").ids
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == "hello abc hello ."


@by_tokenizer
def test_time_is_linear_even_for_garbage_that_never_completes_a_character(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    broken = tokenizer.encode("👍").ids[-3:-2]
    started_s = time.process_time()
    pieces = stream(tokenizer, broken * 50_000)
    assert time.process_time() - started_s < 2
    assert "".join(pieces) == REPLACEMENT * 50_000
    assert sum(map(len, pieces[:100])) > 90, "garbage must not be withheld until the end"
