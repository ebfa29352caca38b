"""Token ids that must not get to the model, or out of it: those without a row in its embedding, and bad words.

Blocking: called in worker threads, and only for the requests that it is about.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.errors import InvalidRequestError
from pdserve.gateway.text.tokenizer import ModelTokenizer


def unknown_token(
    tokenizer: ModelTokenizer, token_ids: Sequence[int], vocab_size: int, param: str
) -> InvalidRequestError:
    """The error for a text with a token that the tokenizer knows and the model does not."""
    token_id = next(token_id for token_id in token_ids if token_id >= vocab_size)
    text = tokenizer.backend_tokenizer.id_to_token(token_id)
    return InvalidRequestError(
        f"{param} has the text {text!r}, which is token {token_id} of the tokenizer, but this model's embedding "
        f"has rows for tokens 0 to {vocab_size - 1} only; leave it out",
        param=param,
        code="invalid_value",
    )


def bad_word_sequences(words: Sequence[str], tokenizer: ModelTokenizer, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """The token sequences of words that must not be written.

    A word is forbidden as it is, and after a blank where that makes another first token of as many tokens.

    Raises:
        InvalidRequestError: a word has no tokens, or one that the model does not know.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        plain, spaced = (tokenizer.encode(lead + word.lstrip(), add_special_tokens=False) for lead in ("", " "))
        if not plain:
            raise InvalidRequestError(
                f"bad_words has {word!r}, of which the tokenizer makes no token",
                param="bad_words",
                code="invalid_value",
            )
        if max(plain) >= vocab_size:
            raise unknown_token(tokenizer, plain, vocab_size, "bad_words")
        found[tuple(plain)] = None
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            found[tuple(spaced)] = None
    return tuple(found)
