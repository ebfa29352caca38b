"""Command lines that answer wrong usage with exit status 2, what was typed, and what was perhaps meant."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable
from typing import NoReturn
from urllib.parse import urlsplit

from pdserve.errors import SettingError

_UNKNOWN = re.compile(r"unrecognized arguments: (\S+)")
_CHOICES = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")


class CommandParser(argparse.ArgumentParser):
    """A parser whose complaint ends with the nearest flag or choice."""

    def error(self, message: str) -> NoReturn:
        """Print the complaint and leave with status 2."""
        if unknown := _UNKNOWN.search(message):
            message += perhaps(unknown[1].partition("=")[0], self._option_string_actions)
        elif choice := _CHOICES.search(message):
            message += perhaps(choice[1], re.findall(r"[\w-]+", choice[2]))
        super().error(message)


def perhaps(typed: str, known: Iterable[str]) -> str:
    """`; did you mean …?` when one of the known words is near, else nothing."""
    close = difflib.get_close_matches(typed, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def base_url(text: str) -> str:
    """The base URL of a service out of what people type: with or without scheme, `/v1` and slashes at the end.

    Raises:
        SettingError: there is no http(s) address in it.
    """
    url = text.strip() if "://" in text else f"http://{text.strip()}"
    try:
        parts = urlsplit(url)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_right = False
    if not is_right or re.search(r"\s", url) or parts.query or parts.fragment:
        raise SettingError("--url", text, "an address such as 127.0.0.1:8000, http://host:8000 or https://host/v1")
    return re.sub(r"(/v1)?/*$", "", url.rstrip("/"))
