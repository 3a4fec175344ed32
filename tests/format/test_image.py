"""Images are standard safetensors files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from flashckpt.format.layout import DTYPES, LEAVES, PAGE, Layout, Leaf
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


def adam(dtype: str, layers: int = 7) -> dict[str, np.ndarray[Any, Any]]:
    """A model's state and its optimizer's: parameters and moments of `dtype`, a 4-byte `step` for each, an
    8-byte counter and some bytes of an odd number."""
    state: dict[str, np.ndarray[Any, Any]] = {
        "counter": np.array(3, np.int64),
        "flags": np.ones(5, np.bool_),
        "odd": np.ones((7, 333), dtype),
        "half odd": np.ones((4, 12), dtype),
    }
    for i in range(layers):
        for name in ("", ".exp_avg", ".exp_avg_sq"):
            state[f"{i}.weight{name}"] = np.ones((256, 64), dtype)
            state[f"{i}.bias{name}"] = np.ones(256, dtype)
        state[f"{i}.weight.step"] = np.array(1, np.float32)
    return state


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_leaves_of_any_size_shift_no_large_leaf(tmp_path: Path, dtype: str) -> None:
    """Kernels that write clones store wide words only where these are aligned in the image."""
    state = adam(dtype)
    layout = Layout.of(Leaf(name=n, dtype=str(v.dtype), shape=v.shape) for n, v in state.items())
    starts = {leaf.name: (layout.data_start + leaf.offset, leaf.num_bytes) for leaf in layout.leaves}
    assert starts.keys() == state.keys()
    for name, (start, size) in starts.items():
        assert start % DTYPES[str(state[name].dtype)][0] == 0
        for unit in (16, 64, 512):
            assert size % unit or start % unit == 0, name
        if size >= 4096 and name != "odd":
            assert start % 512 == 0, name
    # The rule of safetensors: no gaps, and its own library reads the file.
    ends = [layout.data_start] + [start + size for start, size in starts.values()]
    assert [start for start, _ in starts.values()] == ends[:-1]
    image = layout.header + b"".join(state[leaf.name].tobytes() for leaf in layout.leaves)
    assert len(image) == layout.num_bytes
    (tmp_path / "shard.safetensors").write_bytes(image)
    found = load_file(tmp_path / "shard.safetensors")
    for name, value in state.items():
        np.testing.assert_array_equal(found[name], value)


def test_any_order_with_aligned_leaves_is_read() -> None:
    rows = [("a", "float64", 1), ("b", "float32", 1), ("c", "float32", 128), ("d", "bfloat16", 3)]
    leaves = tuple(Leaf(name=name, dtype=dtype, shape=(size,)) for name, dtype, size in rows)
    found = LEAVES.load(LEAVES.dump(leaves))
    assert [leaf.offset for leaf in found] == [0, 8, 12, 524]
    assert Layout.ordered(found).leaves == found
    assert Layout.of(found).leaves != found
    with pytest.raises(ValueError, match="'c' is not aligned"):
        LEAVES.load(LEAVES.dump(leaves[::-1]))
