"""A box of a tensor is not mistaken for a whole tensor."""

from __future__ import annotations

import torch

from flashckpt.format.layout import Box, Leaf
from flashckpt.state.tensors import described, fits


def test_a_box_does_not_fill_a_whole_tensor() -> None:
    whole = Leaf(name="w", dtype="float32", shape=(2, 4))
    piece = Leaf(name="w", dtype="float32", shape=(2, 4), box=Box(shape=(8, 4), start=(2, 0)))
    assert fits(whole, torch.empty(2, 4))
    assert not fits(piece, torch.empty(2, 4))
    assert not fits(piece, torch.empty(8, 4))
    assert described(piece) == "float32 (2, 4), from (2, 0) of (8, 4)"


def test_a_box_fills_only_the_same_box() -> None:
    here = Box(shape=(8, 4), start=(2, 0))
    piece = Leaf(name="w", dtype="float32", shape=(2, 4), box=here)
    assert fits(piece, torch.empty(2, 4), here)
    assert not fits(piece, torch.empty(2, 4), Box(shape=(8, 4), start=(4, 0)))
    assert not fits(piece, torch.empty(2, 4), Box(shape=(9, 4), start=(2, 0)))
    assert not fits(piece, torch.empty(2, 4, dtype=torch.int32), here)
    assert not fits(Leaf(name="w", dtype="float32", shape=(2, 4)), torch.empty(2, 4), here)
    assert described(torch.empty(2, 4), here) == "float32 (2, 4), from (2, 0) of (8, 4)"
