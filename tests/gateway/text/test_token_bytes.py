"""Added tokens are their own text, also when their characters stand for bytes in the rest of the vocabulary."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer

from pdserve.gateway.text.tokenizer import Detokenizer, ModelTokenizer
from pdserve.models.tiny_tokenizer import build_tokenizer

TEXTS = ["đem", "<über>", "日本", "ÿÿ", "čeština", "¡hola!", "naïve café", "<|plain|>", "ŃŃ"]


@pytest.fixture(scope="module")
def backend() -> Tokenizer:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in TEXTS])
    return tokenizer


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("around", [("", ""), ("the ", " of"), ("é😀", "ü")], ids=["alone", "words", "bytes"])
def test_an_added_token_is_its_own_text(backend: Tokenizer, text: str, around: tuple[str, str]) -> None:
    tokenizer = ModelTokenizer(backend, {})
    whole = text.join(around)
    ids = tokenizer.encode(whole)
    assert backend.token_to_id(text) in ids
    assert tokenizer.decode(ids) == whole
    detokenizer = Detokenizer(tokenizer, token_bytes=tokenizer.token_bytes)
    assert "".join([detokenizer.push([index]) for index in ids]) + detokenizer.finish() == whole
    assert tokenizer.bytes_of(backend.token_to_id(text)) == text.encode()


def test_special_tokens_of_such_characters_can_be_hidden() -> None:
    backend = build_tokenizer()
    backend.add_special_tokens([AddedToken("<fín>", normalized=False)])
    tokenizer = ModelTokenizer(backend, {})
    ids = tokenizer.encode("the<fín> of")
    assert tokenizer.decode(ids) == "the<fín> of"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the of"


def test_other_entries_decode_as_the_library_does(backend: Tokenizer) -> None:
    tokenizer = ModelTokenizer(backend, {})
    texts = {backend.token_to_id(text) for text in TEXTS}
    ids = [index for index in range(backend.get_vocab_size()) if index not in texts]
    assert tokenizer.decode(ids) == backend.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(("text", "byte"), [("č", b"\r"), ("Ġ", b" "), ("ÿ", b"\xff"), ("a", b"a")])
def test_a_byte_stays_a_byte_though_it_is_added_once_more(text: str, byte: bytes) -> None:
    backend = build_tokenizer()
    size = backend.get_vocab_size()
    backend.add_tokens([AddedToken(text, normalized=False)])
    assert backend.get_vocab_size() == size
    assert ModelTokenizer(backend, {}).bytes_of(backend.token_to_id(text)) == byte
