"""From the leaves of a snapshot into live tensors: in place where they exist, made anew where not.

Owns which live tensor a leaf has become, so that ties stay ties and what was apart stays apart, and the
copies that are still to be made. Tensors handed out by a snapshot are views of memory that goes: they are
copied and never kept.
"""

from __future__ import annotations

import functools
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashckpt import _native
from flashckpt.errors import DamagedError
from flashckpt.format.layout import Leaf
from flashckpt.format.typed import Hole, LeafRef
from flashckpt.state import rng
from flashckpt.state.leaves import part_names
from flashckpt.state.tensors import (
    assemble,
    dress,
    fill,
    fits,
    is_wrapper,
    kind_of,
    make,
    part_name,
    same_memory,
    strides,
)
from flashckpt.state.values import CONTAINERS, children, join, rebuild

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Saved:
    """A snapshot as it is read: its leaves, its values (decoded), and the bytes of a leaf as a row-major
    tensor on the CPU with the leaf's dtype and shape, which is only valid while it is asked for."""

    leaves: Mapping[str, Leaf]
    value: dict[str, Any]
    tensor: Callable[[str], Tensor]

    @functools.cached_property
    def names(self) -> dict[str, str]:
        """Each name of each leaf -> the name it is stored under."""
        aliases = {alias: leaf.name for leaf in self.leaves.values() for alias in leaf.aliases}
        return {name: name for name in self.leaves} | aliases


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_inference()
    )


class Filling:
    """One restore: what is filled already, under which leaf's name. Copies between plain host tensors are put
    off until `make_copies`, and made at once after it."""

    def __init__(self, saved: Saved) -> None:
        self._saved = saved
        self._live: dict[str, Tensor] = {}
        self._taken: dict[int, list[Tensor]] = {}
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._puts_off = True
        self.filled: list[tuple[str, Tensor]] = []

    def make_copies(self) -> None:
        """Make every copy that was put off."""
        pairs, self._copies, self._puts_off = self._copies, [], False
        if not pairs:
            return
        digests = array("Q", bytes(8 * len(pairs)))
        _native.copy_digest(
            array("Q", [source.data_ptr() for _, source in pairs]),
            array("Q", [live.data_ptr() for live, _ in pairs]),
            array("Q", [live.numel() * live.element_size() for live, _ in pairs]),
            _native.address_of(digests),
            torch.get_num_threads(),
        )
        for live, _ in pairs:
            torch.autograd.graph.increment_version(live)

    def leaf(self, name: str) -> Leaf:
        """The leaf that is stored under a name or one of its further names. Raises DamagedError."""
        try:
            return self._saved.leaves[self._saved.names[name]]
        except KeyError:
            raise DamagedError(f"The snapshot names {name!r} and does not hold it; it is no use.") from None

    def holds(self, name: str) -> bool:
        """Whether a leaf is stored under this name, or listed with it."""
        return name in self._saved.names

    def names_under(self, entry: str) -> list[str]:
        """All names of leaves that belong to a named object."""
        return [name for name in self._saved.names if name.startswith(entry + ".")]

    def fill(self, name: str, live: Tensor) -> None:
        """Fill a live tensor that fits, once."""
        leaf = self.leaf(name)
        if leaf.name not in self._live:
            self._copy(leaf, live)
            self._becomes(leaf, live)

    def _copy(self, leaf: Leaf, live: Tensor) -> None:
        source = self._saved.tensor(leaf.name)
        plain = _is_plain(live) and _is_plain(source) and live.dtype == source.dtype
        if self._puts_off and plain and live.numel():
            self._copies.append((live, source))
        else:
            fill(live, source)

    def _becomes(self, leaf: Leaf, live: Tensor) -> None:
        self._live[leaf.name] = live
        self._taken.setdefault(live.data_ptr(), []).append(live)
        self.filled.append((leaf.name, live))

    def place(
        self, ref: LeafRef, name: str, live: object, home: torch.device, like: Tensor | None = None
    ) -> Tensor:
        """The tensor that belongs where `ref` stands: `live`, filled, if it can be; the tensor that the
        leaf has become already; or a new one, as recorded, on `home` or the device class recorded."""
        about = ref.about
        if "parts" in about:
            return self._place_wrapper(ref, name, live, home, like)
        leaf = self.leaf(name)
        known = self._live.get(leaf.name)
        if known is not None:
            if live is known or not about.get("shares"):
                return known
            return known.detach()
        recorded = about.get("device")
        device = home if recorded in (None, home.type) else torch.device(str(recorded))
        if isinstance(live, Tensor) and self._usable(live, leaf, device, str(about.get("class", ""))):
            self.fill(name, live)
            return live
        plain = make(leaf, device)
        self._copy(leaf, plain)
        made = dress(plain, about, like)
        self._becomes(leaf, made)
        return made

    def _usable(self, live: Tensor, leaf: Leaf, device: torch.device, recorded_class: str) -> bool:
        if is_wrapper(live) or live.layout is not torch.strided or not fits(leaf, live):
            return False
        if kind_of(live) != (recorded_class or "torch.Tensor"):
            return False
        if live.device.type != device.type or strides(live) != leaf.stride:
            return False
        return not any(same_memory(live, taken) for taken in self._taken.get(live.data_ptr(), ()))

    def _place_wrapper(
        self, ref: LeafRef, name: str, live: object, home: torch.device, like: Tensor | None
    ) -> Tensor:
        about = ref.about
        parts: dict[str, Tensor] = {}
        same = isinstance(live, Tensor) and kind_of(live) == about.get("class")
        same = same and tuple(live.shape) == about.get("shape")  # type: ignore[attr-defined]
        for attribute in part_names(about):
            inner = getattr(live, attribute, None) if same else None
            parts[attribute] = self.place(LeafRef(attribute), part_name(name, attribute), inner, home)
            same = same and parts[attribute] is inner
        if same and isinstance(live, Tensor):
            return live
        return assemble(about, parts, like)

    def settle(self, value: Any, live: Any, name: str, home: torch.device = _CPU) -> Any:
        """A saved nested value in the place of `live`, which is kept and changed where it can be."""
        return Settling(self, home).settle(value, live, name)


def _refill(live: Any, value: Any) -> bool:
    """Give an array, a set, a counter or a bytearray that is there the saved contents, if it can be."""
    if type(live) is np.ndarray:
        if live.dtype != value.dtype or live.shape != value.shape or not live.flags.writeable:
            return False
        np.copyto(live, value)
    elif type(live) in (set, Counter):
        live.clear()
        live.update(value)
    elif type(live) is bytearray:
        try:
            live[:] = value
        except BufferError:  # something looks at its memory, which therefore keeps its length
            return False
    else:
        return False
    return True


class Settling:
    """Puts a saved nested value back, keeping the containers and tensors that exist."""

    def __init__(
        self,
        filling: Filling,
        home: torch.device,
        *,
        like: Tensor | None = None,
        holes: Iterator[object] | None = None,
        scalars_on_cpu: bool = False,
    ) -> None:
        self._filling, self._home, self._like, self._holes = filling, home, like, holes or iter(())
        # One object in two places, where two were saved: only the first may take its contents.
        self._kept: dict[int, object] = {}
        # Step counters of a run on a CPU: they stay there when its parameters move to a device.
        self._scalars_on_cpu = scalars_on_cpu and home.type != "cpu"

    def settle(self, value: Any, live: Any, name: str) -> Any:
        """What belongs in the place of `live`, which is kept and changed where it can be."""
        kind = type(value)
        if kind is LeafRef:
            stays = self._scalars_on_cpu and not value.about and not self._filling.leaf(name).shape
            return self._filling.place(value, name, live, _CPU if stays else self._home, self._like)
        if kind is Hole:
            for held in self._holes:
                return held
            raise DamagedError("The snapshot holds fewer values than it has places for. It cannot be used.")
        if kind in CONTAINERS:
            return self._settle_items(value, live, name)
        if rng.is_generator(live) and type(live) is kind:
            rng.restore_one(live, rng.capture_one(value))
            return live
        if type(live) is kind and id(live) not in self._kept and _refill(live, value):
            self._kept[id(live)] = live
            return live
        return value

    def _settle_items(self, value: Any, live: Any, name: str) -> Any:
        same = type(live) is type(value)
        before = dict(children(live)) if same else {}
        items = [(key, self.settle(item, before.get(key), join(name, key))) for key, item in children(value)]
        same = same and getattr(live, "maxlen", None) == getattr(value, "maxlen", None)
        if not same or type(value) is tuple:
            return rebuild(value, items)
        live.clear()
        if isinstance(live, dict):
            live.update(items)
        else:
            live.extend(item for _, item in items)
        return live
