"""Images are stock safetensors files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from flashckpt.format.checked_json import Fields
from flashckpt.format.layout import PAGE, Box, Layout, Leaf, leaf_columns, leaves_from_columns
from tests.commit.runs import image_of, leaves_of


def test_the_stock_library_opens_an_image(tmp_path: Path) -> None:
    image, layout, _ = image_of(leaves_of(7))
    path = tmp_path / "shard.safetensors"
    path.write_bytes(image)
    found = load_file(path)
    assert found.keys() == leaves_of(7).keys()
    for name, value in leaves_of(7).items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value)
    assert layout.data_start % PAGE == 0


def test_leaves_that_are_read_have_one_object_for_what_is_alike() -> None:
    """Who puts a step of hundreds of ranks together holds the tables of all of them."""
    box = Box(shape=(8, 300), start=(2, 0))
    made = Layout.of(
        [Leaf(name=f"layers.{i}.weight", dtype="float32", shape=(2, 300), box=box) for i in range(3)]
        + [Leaf(name="whole", dtype="float32", shape=(2, 300))]
    )
    leaves = leaves_from_columns(Fields(leaf_columns(made.leaves), "a table", 2))
    assert leaves == made.leaves
    assert len({id(leaf.shape) for leaf in leaves}) == 1
    assert len({id(leaf.box) for leaf in leaves[:3]}) == 1
    placed = Layout.of(reversed(leaves))
    assert placed == made
    assert all(map(lambda one, other: one is other, placed.leaves, leaves))
