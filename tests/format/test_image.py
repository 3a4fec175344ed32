"""Images are stock safetensors files, and their headers come back as the leaves they were made of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from flashckpt.errors import DamagedError
from flashckpt.format.image import check_header, parse_header, read_header
from flashckpt.format.layout import DTYPES, PAGE, Layout, Leaf
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


def test_a_header_comes_back() -> None:
    leaves = [Leaf(name=f"leaf {dtype} é", dtype=dtype, shape=(3, 2)) for dtype in DTYPES]
    layout = Layout.of(
        [*leaves, Leaf(name="empty", dtype="int32", shape=(0,)), Leaf(name="0-d", dtype="int16", shape=())]
    )
    found = parse_header(layout.header, layout.num_bytes, "file")
    assert [(leaf.name, leaf.offset, leaf.num_bytes) for leaf in found] == [
        (leaf.name, leaf.offset, leaf.num_bytes) for leaf in layout.leaves
    ]
    for leaf, stored in zip(layout.leaves, found, strict=True):
        spelled = DTYPES[leaf.dtype][1] is not None
        assert (stored.dtype, stored.shape) == (
            (leaf.dtype, leaf.shape) if spelled else ("uint8", (leaf.num_bytes,))
        )


def test_no_leaf_at_all() -> None:
    layout = Layout.of([])
    assert parse_header(layout.header, layout.num_bytes, "file") == ()


def test_a_header_that_is_not_the_parts() -> None:
    layout = Layout.of([Leaf(name="a", dtype="float32", shape=(2,))])
    check_header(layout.header, layout, "file")
    with pytest.raises(DamagedError, match="not the one"):
        check_header(layout.header, Layout.of([Leaf(name="b", dtype="float32", shape=(2,))]), "file")


def test_reading_follows_no_link_and_takes_no_folder(tmp_path: Path) -> None:
    image, layout, _ = image_of(leaves_of(7))
    (tmp_path / "file").write_bytes(image)
    assert read_header(str(tmp_path / "file")) == (layout.header, len(image))
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(OSError, match="symbolic links"):
        read_header(str(tmp_path / "link"))
    with pytest.raises(DamagedError, match="regular"):
        read_header(str(tmp_path))
