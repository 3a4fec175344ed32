"""Typed JSON keeps types, order and bits, and refuses invalid encodings."""

import enum
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashckpt.errors import DamagedError, StateError
from flashckpt.format.typed import (
    MAX_DEPTH,
    Encoded,
    Hole,
    LeafRef,
    check_roundtrip,
    decode_json,
    encode_json,
    register,
    same,
)
from tests.ids import shown


def there_and_back(value: Any) -> Any:
    return decode_json(encode_json(value))


KEYS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=8),
    lambda inner: st.tuples(inner, inner),
    max_leaves=3,
)
SIMPLE = (
    KEYS
    | st.floats()
    | st.integers(min_value=-(1 << 5000), max_value=1 << 5000)
    | st.complex_numbers()
    | st.text(alphabet=st.characters(codec=None, categories=("Cs", "L")), max_size=4)
    | st.binary(max_size=20).map(bytearray)
    | st.builds(range, st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 3))
    | st.builds(slice, st.none() | st.integers(), st.none() | st.integers())
)
VALUES = st.recursive(
    SIMPLE,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(KEYS, inner, max_size=3).map(lambda d: defaultdict(list, d))
        | st.dictionaries(KEYS, st.integers(), max_size=3).map(Counter)
        | st.sets(KEYS, max_size=4)
        | st.frozensets(KEYS, max_size=4)
        | st.lists(inner, max_size=4).map(lambda items: deque(items, maxlen=5))
    ),
    max_leaves=12,
)


@given(VALUES)
@settings(max_examples=100, deadline=None)
def test_round_trip(value: Any) -> None:
    assert same(value, there_and_back(value))
    check_roundtrip(value, "x")


@pytest.mark.parametrize(
    "key", [30, -1, True, None, 1.5, (1, "a"), b"a", "!x", "", "ä", "\ud800", "a", 1j], ids=repr
)
def test_a_dict_with_keys_of_one_type(key: Any) -> None:
    assert same({key: [1]}, there_and_back({key: [1]}))
    assert same([{key: 1}], there_and_back([{key: 1}]))


@pytest.mark.parametrize("size", [20, 3])
@pytest.mark.parametrize("item", [math.inf, math.nan, 1 << 9000, "\ud800", "ä", True, 2.5, None, -0.0, "1"])
def test_lists_of_one_kind(item: Any, size: int) -> None:
    """Long lists of one type take a fast path."""
    assert same([item] * size, there_and_back([item] * size))
    assert same([1, item] * size, there_and_back([1, item] * size))


def test_the_types_that_plain_json_loses() -> None:
    value = {2: "a", "2": "b", True: 1, None: (1, [2]), (1, "x"): {1, 2}, 1.5: b"\0", "!tuple": [1]}
    back = there_and_back(value)
    assert list(back) == list(value)
    assert [type(key) for key in back] == [type(key) for key in value]
    assert same(value, back)
    assert not same({"1": 0}, {1: 0})
    assert not same([1], [True])
    assert not same(0.0, -0.0)
    assert not same((1,), [1])
    assert not same({"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert not same(defaultdict(list), defaultdict(dict))
    assert not same(deque([1], 3), deque([1], 4))


def test_nan_keeps_its_bits() -> None:
    odd = struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]
    assert struct.pack(">d", there_and_back(odd)).hex() == "fff8000000000123"


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


Point = namedtuple("Point", "x y")  # noqa: PYI024


@pytest.mark.parametrize(
    "value",
    [
        object(),
        Colour.RED,
        Text("a"),
        Point(1, 2),
        lambda: 0,
        memoryview(b""),
        defaultdict(lambda: 0),
        int,
        ...,
    ],
    ids=shown,
)
def test_what_has_no_exact_encoding_is_refused_with_its_path(value: Any) -> None:
    with pytest.raises(StateError) as caught:
        check_roundtrip({"a": [1, {"b": value}]}, "optimizer")
    assert caught.value.location == "optimizer.a.1.b"
    assert "optimizer.a.1.b cannot be saved exactly" in str(caught.value)


def test_cycles_and_depth_are_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(StateError, match="contain themselves"):
        encode_json({"a": loop})
    deep: Any = 1
    for _ in range(MAX_DEPTH - 2):
        deep = [deep]
    assert same(there_and_back(deep), deep)
    for _ in range(5):
        deep = [deep]
    with pytest.raises(StateError, match="deeper"):
        encode_json(deep)


def test_an_encoded_value_is_written_unchanged() -> None:
    fixed = Encoded({"names": ["a", "b"], "t": (1,)})
    value = {"state": {"entries": {"optimizer": {"params": fixed, "n": (1, 2)}}}, "rng": 3}
    assert there_and_back(value) == {
        "state": {"entries": {"optimizer": {"params": {"names": ["a", "b"], "t": (1,)}, "n": (1, 2)}}},
        "rng": 3,
    }
    check_roundtrip(value, "x")
    assert there_and_back({1: fixed}) == {1: fixed.value}
    assert there_and_back({"!x": {"a": fixed}}) == {"!x": {"a": fixed.value}}
    nested = {"sources": [{"first": [fixed], "é": [], "state": fixed}, fixed], "empty": {}}
    plain = {"sources": [{"first": [fixed.value], "é": [], "state": fixed.value}, fixed.value], "empty": {}}
    assert encode_json(nested) == encode_json(plain)
    assert encode_json([fixed, {1: fixed}]) == encode_json([fixed.value, {1: fixed.value}])


def test_references_and_holes() -> None:
    value = [LeafRef("a.b"), LeafRef("c", {"device": "cpu", "shape": (1, 2)}), Hole()]
    assert there_and_back(value) == value


HOSTILE = [
    b"",
    b"{",
    b"NaN",
    b"1e999",
    b'{"a":1,"a":2}',
    b'{"!nothing":1}',
    b'{"!tuple":[],"b":1}',
    b'{"!set":[[]]}',
    b'{"!set":[1,1]}',
    b'{"!dict":[[[],1]]}',
    b'{"!dict":[[1,1],[1,2]]}',
    b'{"!defaultdict":["eval",[]]}',
    b'{"!bytes":"@@"}',
    b'{"!float":"00"}',
    b'{"!int":"0xzz"}',
    b'{"!complex":"00"}',
    b'{"!range":["a"]}',
    b'{"!leaf":[1,2]}',
    b'{"!str":"zz"}',
    b'{"!deque":[-1,[]]}',
    b'{"!deque":"ab"}',
    b"[" * 100_000,
    b'{"!tuple":[' * 300 + b"]}" * 300,
    b"9" * 5000,
    b"\xff\xfe",
]


@pytest.mark.parametrize("data", HOSTILE, ids=lambda data: repr(data[:30]))
def test_invalid_encodings_are_damaged(data: bytes) -> None:
    with pytest.raises(DamagedError):
        decode_json(data)


def is_a_value_or_damaged(data: bytes) -> bool:
    """A decoded value can be encoded again and decodes to the same value, but not always to the same text: a
    set keeps its insertion order."""
    try:
        value = decode_json(data)
    except DamagedError:
        return True
    return same(decode_json(encode_json(value)), value)


@given(VALUES, st.data())
@settings(max_examples=80, deadline=None)
def test_a_changed_tag_never_escapes(value: Any, data: st.DataObject) -> None:
    """Truncated or changed bytes give a value or DamagedError, never another exception."""
    text = bytearray(encode_json(value))
    place = data.draw(st.integers(0, len(text) - 1))
    text[place] = data.draw(st.integers(32, 126))
    assert is_a_value_or_damaged(bytes(text))


def test_adapters_are_exact_types_and_checked() -> None:
    class Ratio:
        def __init__(self, a: int, b: int) -> None:
            self.a, self.b = a, b

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Ratio) and (self.a, self.b) == (other.a, other.b)

        __hash__ = None  # type: ignore[assignment]

    register(Ratio, "test.Ratio", lambda r: [r.a, r.b], lambda plain: Ratio(*plain))
    assert there_and_back([Ratio(1, 2)]) == [Ratio(1, 2)]
    with pytest.raises(DamagedError):
        decode_json(b'{"!test.Ratio":[1,2,3]}')
    with pytest.raises(ValueError, match="taken"):
        register(int, "test.Ratio", int, int)

    class Lossy(Ratio):
        pass

    register(Lossy, "test.Lossy", lambda r: r.a, lambda plain: Lossy(plain, 0))
    with pytest.raises(StateError, match=r"x\.r cannot be saved exactly: its decoded form differs"):
        check_roundtrip({"r": Lossy(1, 2)}, "x")
