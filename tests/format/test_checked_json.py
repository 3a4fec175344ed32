"""The envelope of every small file."""

from __future__ import annotations

import pytest

from flashckpt._native import xxh3_128
from flashckpt.errors import DamagedError, FormatError
from flashckpt.format.checked_json import MAX_DEPTH, dump, parse

MAX = 1 << 20
OBJ = {"a": 1, "text": 'é"\\\ud800', "list": [1.5, None, True, {"deep": []}]}


def sealed(head: bytes) -> bytes:
    """The bytes of a file with the right checksum, whatever it says."""
    return head + b',"checksum":"' + xxh3_128(head).hex().encode() + b'"}\n'


def test_round_trip() -> None:
    data = dump(OBJ)
    assert parse(data, what="file", max_bytes=MAX) == OBJ
    assert data.startswith(b'{"format":1,')
    assert data.isascii()
    assert dump(OBJ) == data


def test_every_flipped_bit_and_every_cut_is_found() -> None:
    data = dump(OBJ)
    for byte in range(len(data)):
        for bit in range(8):
            flipped = data[:byte] + bytes([data[byte] ^ 1 << bit]) + data[byte + 1 :]
            with pytest.raises(DamagedError):
                parse(flipped, what="file", max_bytes=MAX)
        with pytest.raises(DamagedError):
            parse(data[:byte], what="file", max_bytes=MAX)
    with pytest.raises(DamagedError):
        parse(data + b"\n", what="file", max_bytes=MAX)


def test_the_error_names_the_file() -> None:
    with pytest.raises(DamagedError, match="attempts/000001.json") as caught:
        parse(b"", what="attempts/000001.json", max_bytes=MAX)
    assert caught.value.path == "attempts/000001.json"


@pytest.mark.parametrize(
    "head",
    [
        b'{"format":1,"a":1,"a":2',
        b'{"format":1,"a":{"b":1,"b":1}',
        b'{"format":1,"a":NaN',
        b'{"format":1,"a":-Infinity',
        b'{"format":1,"a":1e999',
        b'{"format":1,"a":' + b"9" * 5000,
        b'{"format":1,"a":' + b"[" * 5000 + b"]" * 5000,
        b'{"format":1,"a":' + b"[" * 100_000,
        b'{"format":1,"a":' + b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1),
        b'{"format":1,"a":"\xff"',
        b'{"format":1,"a":"\xed\xa0\x80"',
        b'{"format":"1"',
        b'{"format":true',
        b'{"format":0',
        b'{"format":null',
        b'{"a":1',
        b"[1",
        b"",
        b'{"format":1}{"b":1',
    ],
)
def test_what_json_is_lax_about_is_refused(head: bytes) -> None:
    with pytest.raises(DamagedError):
        parse(sealed(head), what="file", max_bytes=MAX)


def test_nesting_up_to_the_limit() -> None:
    value: object = 0
    for _ in range(MAX_DEPTH - 1):
        value = [value]
    assert parse(dump({"a": value}), what="file", max_bytes=MAX) == {"a": value}
    with pytest.raises(ValueError, match="nested deeper"):
        dump({"a": [value]})


def test_what_could_not_be_read_back_is_not_written() -> None:
    for value in (float("nan"), float("inf"), 10**5000):
        with pytest.raises(ValueError, match=r"JSON|digits"):
            dump({"a": value})


def test_size_is_bounded() -> None:
    data = dump({"a": "x" * 100})
    with pytest.raises(DamagedError, match="at most"):
        parse(data, what="file", max_bytes=len(data) - 1)


def test_a_newer_format() -> None:
    with pytest.raises(FormatError, match="format 2; this flashckpt reads up to 1"):
        parse(sealed(b'{"format":2,"whatever":[]'), what="run.json", max_bytes=MAX)
