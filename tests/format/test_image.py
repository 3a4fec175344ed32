"""Images are stock safetensors files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from flashckpt.format.layout import PAGE
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
