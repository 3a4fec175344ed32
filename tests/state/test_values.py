"""Values that torch and NumPy add to typed JSON: exact or refused; malformed ones are damaged."""

import random
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

import flashckpt.state.values  # noqa: F401
from flashckpt.errors import DamagedError, StateError
from flashckpt.format.typed import check_roundtrip, decode_json, encode_json, same
from tests.ids import shown

VALUES: list[Any] = [
    torch.Size([1, 2]), torch.float8_e5m2, torch.qint8, torch.device("cuda", 3), torch.device("cpu"),
    torch.strided, torch.channels_last, torch.Generator().manual_seed(3), np.random.default_rng(4),
    np.random.Generator(np.random.MT19937(3)), np.random.Generator(np.random.Philox(3)),
    np.random.RandomState(3), random.Random(3), np.float64(0.1), np.float32("nan"), np.int64(-3),
    np.bool_(True), np.str_("ä"), np.str_(""), np.bytes_(b"ab"), np.datetime64("2024-01-01", "D"),
    np.longdouble("1.1"), np.complex64(1j), np.arange(6).reshape(2, 3), np.asfortranarray(np.ones((2, 3))),
    np.empty((0, 3)), np.array(3.5), np.array(["a", "bcd"]), np.array([True]),
    np.dtype("float32"), np.dtype("<U5"), Counter({30: 1}), OrderedDict(a=1),
    {torch.float32: 1, torch.device("cpu"): 2, np.int64(3): 4},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda v: f"{type(v).__name__}-{v}"[:30])
def test_values_of_torch_and_numpy(value: Any) -> None:
    check_roundtrip(value, "x")
    back = decode_json(encode_json(value))
    assert type(back) is type(value)
    assert same(back, value)


@pytest.mark.parametrize(
    "value",
    [np.array([object()]), np.array([(1, 2)], dtype="i4,i4"), np.ma.array([1])],
    ids=shown,
)
@pytest.mark.filterwarnings("ignore")
def test_arrays_that_are_refused(value: Any) -> None:
    with pytest.raises(StateError):
        check_roundtrip(value, "x")


@pytest.mark.parametrize(
    "data",
    [
        b'{"!numpy.array":["|O",[1],{"!bytes":"AAAAAAAAAAA="},false]}',
        b'{"!numpy.array":["<f8",[1000000000000],{"!bytes":"AAAAAAAAAAA="},false]}',
        b'{"!numpy.array":["<f8",[-1],{"!bytes":"AAAAAAAAAAA="},false]}',
        b'{"!numpy.array":["<f8",[true],{"!bytes":"AAAAAAAAAAA="},false]}',
        b'{"!numpy.array":3}',
        b'{"!numpy.scalar":["<f8",{"!bytes":"AAAA"}]}',
        b'{"!numpy.dtype":"i4,i4"}',
        b'{"!torch.dtype":"nothing"}',
        b'{"!torch.device":"nothing"}',
        b'{"!torch.device":"cpu; import os"}',
        b'{"!torch.Generator":["cpu",{"!bytes":"AAAA"}]}',
        b'{"!numpy.Generator":["eval",{}]}',
        b'{"!numpy.Generator":["PCG64",{}]}',
        b'{"!random.Random":[1,2]}',
        b'{"!torch.Size":["a"]}',
    ],
)
def test_hostile_values_of_torch_and_numpy(data: bytes) -> None:
    with pytest.raises(DamagedError):
        decode_json(data)
