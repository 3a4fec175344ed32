"""A snapshot as bytes alone: the content of a slot, without any other part of the library."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashckpt.format.layout import Layout
from flashckpt.format.typed import decode_json, encode_json
from flashckpt.state.tensors import TORCH_DTYPES, bits, leaf_of
from flashckpt.state.tree import Saved, Tree, Walk


def all_used_up(parameter: object, gradient: Tensor) -> bool:
    return True


def none_used_up(parameter: object, gradient: Tensor) -> bool:
    return False


def raw_bytes(tensor: Tensor) -> bytes:
    """Return a tensor's elements in row-major order, including NaN payloads."""
    plain = bits(tensor.detach()).cpu().contiguous()
    return plain.flatten().view(torch.uint8).numpy().tobytes() if plain.numel() else b""


@dataclass
class Image:
    """Bytes, without references to the state that they came from."""

    layout: Layout
    data: bytes
    values: bytes

    @classmethod
    def of(cls, walk: Walk, values: dict[str, Any] | None = None) -> "Image":
        layout = Layout.of(leaf_of(leaf.name, leaf.tensor, leaf.aliases, leaf.box) for leaf in walk.leaves)
        tensors = {leaf.name: leaf.tensor for leaf in walk.leaves}
        data = b"".join(raw_bytes(tensors[leaf.name]) for leaf in layout.leaves)
        return cls(layout, data, encode_json(walk.value if values is None else values))

    def saved(self) -> Saved:
        """Return a Saved over a copy of the bytes that is freed after the restore."""
        leaves = {leaf.name: leaf for leaf in self.layout.leaves}
        scratch = bytearray(self.data)

        def tensor(name: str) -> Tensor:
            leaf = leaves[name]
            dtype = TORCH_DTYPES[leaf.dtype]
            if not leaf.num_bytes:
                return torch.empty(leaf.shape, dtype=dtype)
            window = memoryview(scratch)[leaf.offset : leaf.offset + leaf.num_bytes]
            # torch refuses odd offsets: leaves are aligned in an image, but its copy need not be.
            flat = torch.frombuffer(bytearray(window), dtype=torch.uint8)
            return flat.view(dtype).view(leaf.shape) if leaf.shape else flat.view(dtype)[0]

        return Saved(leaves=leaves, value=decode_json(self.values), tensor=tensor)


def capture(tree: Tree, used_up: Callable[[Any, Tensor], bool] = all_used_up) -> Image:
    """Walk a state and copy its bytes."""
    return Image.of(tree.walk(used_up))


def restore(tree: Tree, image: Image) -> None:
    """Restore, and check that each leaf arrived in a live tensor, bit for bit."""
    saved = image.saved()
    assert tree.differences(saved) == []
    filled = dict(tree.restore(saved))
    assert filled.keys() == saved.leaves.keys()
    for name, live in filled.items():
        assert raw_bytes(live) == raw_bytes(saved.tensor(name)), name


def check_continues(
    build: Callable[[int], Any],
    train: Callable[..., object],
    before: range = range(3),
    after: range = range(3, 6),
    used_up: Callable[[Any, Tensor], bool] = all_used_up,
) -> None:
    """Check that training continues from bytes alone like an uninterrupted one. `build` takes a seed; it
    returns a tree and what `train` trains. What `train` returns must be equal, too."""
    tree, *parts = build(0)
    train(*parts, before)
    image = capture(tree, used_up)
    expected = train(*parts, after)
    again, *others = build(9)
    restore(again, image)
    assert train(*others, after) == expected
    assert_same(tree, again)


def contents(tree: Tree, used_up: Callable[[Any, Tensor], bool] = none_used_up) -> dict[str, object]:
    """Return the whole content of a state, to compare two states."""
    walk = tree.walk(used_up)
    found: dict[str, object] = {
        leaf.name: (
            leaf.tensor.dtype,
            tuple(leaf.tensor.shape),
            leaf.tensor.stride(),
            raw_bytes(leaf.tensor),
            set(leaf.aliases),
        )
        for leaf in walk.leaves
    }
    found["values"] = encode_json(walk.value)
    return found


def assert_same(first: Tree, second: Tree, used_up: Callable[[Any, Tensor], bool] = none_used_up) -> None:
    """Check that two states are bit for bit the same, including gradients that are not used up."""
    a, b = contents(first, used_up), contents(second, used_up)
    assert a.keys() == b.keys()
    assert [name for name in a if a[name] != b[name]] == []
