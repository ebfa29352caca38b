"""The public import path of the detokenizer: ids → text while they come."""

from pdserve.gateway.text.tokenizer import Detokenizer

__all__ = ["Detokenizer"]
