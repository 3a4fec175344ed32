"""The envelope of every small file."""

from contextlib import suppress

import pytest

from flashckpt._native import xxh3_128
from flashckpt.errors import DamagedError, FormatError
from flashckpt.format.checked_json import FORMAT, MAX_DEPTH, TAIL_BYTES, dump, parse, parse_head

MAX = 1 << 20
OBJ = {"a": 1, "text": 'é"\\\ud800', "list": [1.5, None, True, {"deep": []}]}


def sealed(head: bytes) -> bytes:
    """The bytes of a file with any content and a right checksum."""
    return head + b',"checksum":"' + xxh3_128(head).hex().encode() + b'"}\n'


def test_round_trip() -> None:
    data = dump(OBJ)
    assert parse(data, what="file", max_bytes=MAX) == OBJ
    assert data.startswith(b'{"format":1,')
    assert data.isascii()
    assert dump(OBJ) == data


def _head_read(data: bytes) -> object:
    with suppress(DamagedError):
        return parse_head(data, what="file")
    return None


def test_a_head_is_read_without_the_rest() -> None:
    """The head alone is verified, since committers read only the head."""
    head, after = {"a": 1, "files": [["x", 2]]}, {"head of": {"head": "0" * 32}, "z": OBJ}
    data = dump(head, after)
    end = data.index(b',"head":"') + len(b',"head":"') + 32 + 1
    assert parse_head(data[:end], what="file") == head
    assert parse_head(data, what="file") == head
    assert all(parse_head(data[:cut], what="file") is None for cut in range(end))
    whole = parse(data, what="file", max_bytes=MAX)
    assert whole == {**head, "head": xxh3_128(data[: data.index(b',"head":"')]).hex(), **after}
    for byte in range(end):
        flipped = data[:byte] + bytes([data[byte] ^ 1]) + data[byte + 1 :]
        with pytest.raises(DamagedError):
            parse(flipped, what="file", max_bytes=MAX)
        assert _head_read(flipped[:end]) is None
    for other in (
        sealed(data[: end - 2] + b"0" + data[end - 1 : -TAIL_BYTES]),
        sealed(data[:-TAIL_BYTES] + b',"head":1'),
    ):
        with pytest.raises(DamagedError):
            parse(other, what="file", max_bytes=MAX)


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


@pytest.mark.parametrize(
    "head",
    [
        b'{"format":1,"a":1,"a":2',
        b'{"format":1,"a":{"b":1,"b":1}',
        b'{"format":1,"a":NaN',
        b'{"format":1,"a":1e999',
        b'{"format":1,"a":' + b"9" * 5000,
        b'{"format":1,"a":' + b"[" * 100_000,
        b'{"format":1,"a":' + b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1),
        b'{"format":1,"a":"\xff"',
        b'{"format":1,"a":"\xed\xa0\x80"',
        b'{"format":"1"',
        b'{"format":0',
        b'{"a":1',
        b"",
        b'{"format":1}{"b":1',
    ],
)
def test_lax_json_is_refused(head: bytes) -> None:
    with pytest.raises(DamagedError):
        parse(sealed(head), what="file", max_bytes=MAX)


def test_nesting_up_to_the_limit() -> None:
    value: object = 0
    for _ in range(MAX_DEPTH - 1):
        value = [value]
    assert parse(dump({"a": value}), what="file", max_bytes=MAX) == {"a": value}
    with pytest.raises(ValueError, match="nested deeper"):
        dump({"a": [value]})


def test_unreadable_values_are_not_written() -> None:
    for value in (float("nan"), float("inf"), 10**5000):
        with pytest.raises(ValueError, match=r"JSON|digits"):
            dump({"a": value})


def test_size_is_bounded() -> None:
    data = dump({"a": "x" * 100})
    with pytest.raises(DamagedError, match="at most"):
        parse(data, what="file", max_bytes=len(data) - 1)


@pytest.mark.parametrize("version", [2, 4, 5])
def test_another_format(version: int) -> None:
    data = sealed(b'{"format":%d,"whatever":[]' % version)
    with pytest.raises(FormatError, match=f"format {version}; this flashckpt reads only format {FORMAT}"):
        parse(data, what="run.json", max_bytes=MAX)
    head = b'{"format":%d,"a":1' % version
    with pytest.raises(FormatError):
        parse_head(head + b',"head":"' + xxh3_128(head).hex().encode() + b'",', what="run.json")
