"""Compressed bodies, byte order marks and charsets: read, or refused by name."""

from __future__ import annotations

import asyncio
import bz2
import codecs
import gzip
import json
import random
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stand_in import Service, running, speak

from pdserve.errors import RequestError
from pdserve.gateway.http.encodings import MAX_GZIP_MEMBERS, as_utf8, charset_of, codings_of
from pdserve.gateway.openai.frontend import FrontendLimits

PATH = "/v1/completions"
TEXT = json.dumps({"prompt": "the 河 🚲 é", "max_tokens": 1}, ensure_ascii=False)
PLAIN = TEXT.encode()
LIMIT = 1 << 20


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


GZIP = gzip.compress(PLAIN)
CODED = {
    "gzip": GZIP,
    "GZip": GZIP,
    "x-gzip": GZIP,
    "GZIP": GZIP + b"\0" * 300,
    "gzip,": gzip.compress(PLAIN[:7]) + gzip.compress(b"") + gzip.compress(PLAIN[7:]),
    "deflate": zlib.compress(PLAIN),
    "Deflate": raw_deflate(PLAIN),
    "identity": PLAIN,
    "": PLAIN,
    "identity, gzip": GZIP,
    "gzip, identity": GZIP,
    "deflate, gzip": gzip.compress(zlib.compress(PLAIN)),
    "gzip, deflate": zlib.compress(GZIP),
    "gzip,gzip,gzip": gzip.compress(gzip.compress(GZIP)),
}


async def post(service: Service, content: bytes, *headers: tuple[str, str]) -> Any:
    kind = [] if any(name == "content-type" for name, _ in headers) else [("content-type", "application/json")]
    return await service.client.post(PATH, content=content, headers=[*kind, *headers])


def prompt_of(service: Service) -> str:
    return service.frontend.prompts.tokenizer.decode(service.dispatcher.requests[-1].prompt_token_ids)


@pytest.mark.parametrize(("coding", "body"), CODED.items(), ids=map(repr, CODED))
async def test_compressed_bodies_are_read(tiny_model_dir: Path, coding: str, body: bytes) -> None:
    async with running(tiny_model_dir, speak("a")) as service:
        response = await post(service, body, ("content-encoding", coding))
        assert response.status_code == 200, response.text
        assert prompt_of(service) == "the 河 🚲 é"


async def test_several_lines_of_content_encoding_are_one_list(tiny_model_dir: Path) -> None:
    body = gzip.compress(zlib.compress(PLAIN))
    async with running(tiny_model_dir, speak("a")) as service:
        response = await post(service, body, ("content-encoding", "deflate"), ("content-encoding", "gzip"))
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("coding", ["br", "zstd", "compress", "bzip2", "gzip, br", "nonsense", "gzip;q=1", "gzip," * 5])
@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions", "/tokenize"])
async def test_other_encodings_are_a_415_that_names_them(tiny_model_dir: Path, coding: str, path: str) -> None:
    async with running(tiny_model_dir, speak("a")) as service:
        headers = {"content-type": "application/json", "content-encoding": coding}
        response = await service.client.post(path, content=bz2.compress(PLAIN), headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (415, "unsupported_encoding")
    assert "Content-Encoding" in error["message"]
    named = next((name for name in coding.split(",") if name.strip() != "gzip" and name), "5 encodings")
    assert named.strip() in error["message"]
    assert response.headers["accept-encoding"] == "gzip, deflate"


DAMAGED = {
    "cut in the middle": ("gzip", GZIP[: len(GZIP) // 2]),
    "without its check sum": ("gzip", GZIP[:-8]),
    "one byte short": ("gzip", GZIP[:-1]),
    "empty": ("gzip", b""),
    "head alone": ("gzip", GZIP[:10]),
    "wrong check sum": ("gzip", GZIP[:-8] + b"\0" * 8),
    "not compressed": ("gzip", PLAIN),
    "something behind it": ("gzip", GZIP + b"{}"),
    "second member cut": ("gzip", GZIP + GZIP[:-3]),
    "cut zlib": ("deflate", zlib.compress(PLAIN)[:-2]),
    "cut deflate": ("deflate", raw_deflate(PLAIN)[:-2]),
    "plain deflate": ("deflate", PLAIN),
    "behind zlib": ("deflate", zlib.compress(PLAIN) + b"x"),
    "too many members": ("gzip", gzip.compress(b" ") * (MAX_GZIP_MEMBERS + 1)),
    "inner layer": ("deflate, gzip", gzip.compress(zlib.compress(PLAIN)[:-1])),
}


@pytest.mark.parametrize(("coding", "body"), DAMAGED.values(), ids=DAMAGED)
async def test_a_damaged_body_is_a_400_that_names_its_encoding(tiny_model_dir: Path, coding: str, body: bytes) -> None:
    async with running(tiny_model_dir, speak("a")) as service:
        response = await post(service, body, ("content-encoding", coding))
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "invalid_encoding"), error
    assert coding.split(",", maxsplit=1)[0] in error["message"]


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("gzip", gzip.compress(b" " * (LIMIT + 1))),
        ("gzip", gzip.compress(b" " * 500 * LIMIT, 1)),
        ("deflate", zlib.compress(b" " * 100 * LIMIT)),
        ("deflate", raw_deflate(b" " * 100 * LIMIT)),
        ("gzip, gzip", gzip.compress(gzip.compress(b" " * 500 * LIMIT, 9))),
        ("gzip", gzip.compress(b" " * 2000) * 600),
    ],
    ids=["just above", "bomb", "zlib", "raw", "nested", "members"],
)
async def test_the_limit_holds_for_what_is_unpacked(tiny_model_dir: Path, coding: str, body: bytes) -> None:
    async with running(tiny_model_dir, speak("a"), FrontendLimits(max_body_bytes=LIMIT)) as service:
        response = await post(service, body, ("content-encoding", coding))
        fits = await post(service, GZIP, ("content-encoding", "gzip"))
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    assert fits.status_code == 200


async def test_unpacking_blocks_no_other_request(tiny_model_dir: Path) -> None:
    noise = random.Random(0).randbytes(3 << 20).hex().encode()
    body = gzip.compress(b'{"prompt": 5, "x": "%s"}' % noise, 1)
    async with running(tiny_model_dir, speak("a")) as service:
        posted = asyncio.create_task(post(service, body, ("content-encoding", "gzip")))
        while not posted.done():
            assert (await service.client.get("/health")).status_code == 200
        assert (await posted).status_code == 400


@given(data=st.binary(max_size=20_000), cut=st.integers(0, 100), codings=st.lists(st.sampled_from(["gzip", "deflate"])))
def test_whatever_was_packed_comes_out_whole_or_is_an_error(data: bytes, cut: int, codings: list[str]) -> None:
    body = data = b"{" + data.hex().encode()
    for coding in codings:
        body = gzip.compress(body) if coding == "gzip" else raw_deflate(body) if cut % 2 else zlib.compress(body)
    assert as_utf8(body, codings, None, 1 << 20) == data
    if codings and 0 < cut < len(body):
        with pytest.raises(RequestError):
            as_utf8(body[:-cut], codings, None, 1 << 20)


# --- byte order marks and charsets

UNICODE = ["utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"]
MARKS = {
    "utf-8": codecs.BOM_UTF8, "utf-16-le": codecs.BOM_UTF16_LE, "utf-16-be": codecs.BOM_UTF16_BE,
    "utf-32-le": codecs.BOM_UTF32_LE, "utf-32-be": codecs.BOM_UTF32_BE,
}  # fmt: skip


@pytest.mark.parametrize("has_mark", [False, True])
@pytest.mark.parametrize("is_gzip", [False, True])
@pytest.mark.parametrize("encoding", UNICODE)
@pytest.mark.parametrize("declared", ["", "; charset={}"])
async def test_the_bytes_tell_which_unicode_they_are(
    tiny_model_dir: Path, encoding: str, declared: str, is_gzip: bool, has_mark: bool
) -> None:
    body = (MARKS[encoding] if has_mark else b"") + TEXT.encode(encoding)
    name = encoding.removesuffix("-le").removesuffix("-be") if has_mark else encoding.replace("-le", "le")
    headers = [("content-type", "application/json" + declared.format(name.replace("-be", "BE").upper()))]
    if is_gzip:
        body = gzip.compress(body)
        headers.append(("content-encoding", "gzip"))
    async with running(tiny_model_dir, speak("a")) as service:
        response = await post(service, body, *headers)
        assert response.status_code == 200, response.text
        assert prompt_of(service) == "the 河 🚲 é"


@pytest.mark.parametrize(
    ("declared", "encoding"),
    [
        ("iso-8859-1", "latin-1"), ("ISO_8859-1", "latin-1"), ("latin1", "latin-1"), ('"iso-8859-1"', "latin-1"),
        ("windows-1252", "cp1252"), ("iso-8859-15", "iso8859-15"), ("UTF-8", "utf-8"), ("'utf-8'", "utf-8"),
        ("us-ascii", "utf-8"), ("utf8", "utf-8"),
    ],
)  # fmt: skip
async def test_declared_charsets_are_read(tiny_model_dir: Path, declared: str, encoding: str) -> None:
    body = json.dumps({"prompt": "naïve café", "max_tokens": 1}, ensure_ascii=False).encode(encoding)
    async with running(tiny_model_dir, speak("a")) as service:
        response = await post(service, body, ("content-type", f"application/json; a=b; Charset={declared}"))
        assert response.status_code == 200, response.text
        assert prompt_of(service) == "naïve café"


@pytest.mark.parametrize("charset", ["gbk", "shift_jis", "utf-7", "rot13", "zip", "undefined", "x" * 1000, "", "utf-9"])
async def test_other_charsets_are_a_415_that_names_them(tiny_model_dir: Path, charset: str) -> None:
    async with running(tiny_model_dir, speak("a")) as service:
        response = await post(service, PLAIN, ("content-type", f"application/json; charset={charset}"))
    assert response.status_code == 415
    assert charset[:30].replace("_", "-") in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "declared"),
    [
        (codecs.BOM_UTF8 + b'{"prompt": "\xff"}', ""),
        (codecs.BOM_UTF8 * 2 + PLAIN, ""),
        (codecs.BOM_UTF8, ""),
        (codecs.BOM_UTF16_LE + TEXT.encode("utf-16-le")[:-1], "; charset=utf-16"),
        ('{"prompt": "\ud800"}'.encode("utf-16-le", "surrogatepass"), ""),
        (codecs.BOM_UTF32_BE + b"\xff" * 8, ""),
        (b"\xff\xfe", ""),
        (b"\0\0\0\0", ""),
        (b'{"prompt": "\x81\x8d"}', "; charset=windows-1252"),
        (b'{"prompt": "\xff"}', "; charset=utf-8"),
    ],
)
async def test_bytes_that_are_none_of_their_charset_are_a_400(tiny_model_dir: Path, body: bytes, declared: str) -> None:
    async with running(tiny_model_dir, speak("a")) as service:
        response = await post(service, body, ("content-type", f"application/json{declared}"))
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json"), response.text


def test_names_are_read_without_case_and_blanks() -> None:
    assert codings_of(b" GZIP ,identity, X-Gzip,, deflate") == ["gzip", "gzip", "deflate"]
    assert charset_of(b"application/json") is None
    assert charset_of(b"application/json;charset=UTF-8; version=1") == "utf-8"


async def test_a_transfer_coding_beside_chunks_is_a_501(tiny_model_dir: Path) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: gzip, chunked\r\n\r\n"
    async with running(tiny_model_dir, speak("a")) as service:
        host, port = service.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + b"%x\r\n%s\r\n0\r\n\r\n" % (len(GZIP), GZIP))
        answer = (await reader.read()).decode()
        writer.close()
        await writer.wait_closed()
    assert answer.startswith("HTTP/1.1 501 ")
    assert "gzip, chunked" in json.loads(answer.partition("\r\n\r\n")[2])["error"]["message"]
