"""The leaves of a state: their names, their ties, and the conditions under which a plan stays valid.

Owns three rules: a tensor is stored once, however many names it has; no name is used twice; an optimizer's
state names a parameter by the key in the module that owns the parameter. Owns the two sinks of a walk: `Walk`
collects the whole state, `Refresh` only the values between two walks.

At a restore, `Filling` owns the map from leaves to live tensors, so that tied tensors stay tied and separate
tensors stay separate, and the list of pending copies. The tensors of a snapshot in memory are views of memory
that is released later: they are copied, never kept.
"""

from __future__ import annotations

import functools
import re
import warnings
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence, Set, Sized
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from flashckpt import _native
from flashckpt.errors import DamagedError
from flashckpt.format.layout import Box, Leaf
from flashckpt.format.typed import LeafRef
from flashckpt.state.tensors import (
    DTYPE_NAMES,
    FlatPiece,
    Meshes,
    Ranks,
    TensorBox,
    Whole,
    assemble,
    assembled,
    check,
    dress,
    fill,
    fits,
    flatten,
    is_sharded,
    is_wrapper,
    kind_of,
    make,
    own_placements,
    part_name,
    refuse,
    same_memory,
    span,
    strides,
)

Kind = Literal["parameter", "buffer", "gradient", "optimizer", "value", "other"]

CPU = torch.device("cpu")
_WRAPPED = {
    "_orig_mod": "OptimizedModule",  # torch.compile
    "_fsdp_wrapped_module": "FullyShardedDataParallel",
    "_checkpoint_wrapped_module": "CheckpointWrapper",
}


class Restructured(Exception):
    """Tensors of the state were replaced, added, removed or moved since the last walk: walk again."""


class Place(NamedTuple):
    """Where a tensor was found.

    container, key: the tensor is `container[key]` or `getattr(container, key)`; container is None if the
        owner makes a new tensor at each access.
    home: the device of a tensor in this place, unless another one is recorded.
    parameter: the parameter to which a tensor of an optimizer's state belongs.
    piece: the slice of a larger tensor that this tensor is, as far as the walk knows it.
    wrapper: the outermost tensor subclass that contains this tensor.
    """

    kind: Kind
    owner: object
    container: object = None
    key: object = None
    home: torch.device = CPU
    parameter: Tensor | None = None
    piece: TensorBox = TensorBox(None, ())
    wrapper: Tensor | None = None


@dataclass(slots=True)
class LiveLeaf:
    """One tensor of the live state.

    container, key: as in `Place`. If container is None, `Tree.values` sets `tensor` to the newest one.
    aliases: further names of the tensor.
    tied: the tensors found under aliases with a container: the same object, or others over its memory.
    box: the slice of a larger tensor that this tensor is; None for a whole tensor.
    replicas: sorted global ranks, including this one, that hold the same data by declaration (DDP,
        Replicate). Empty if no other rank does; the leaf then belongs to this rank.
    whole: the facts on which all ranks with other slices of the tensor must agree.
    wrapper: the outermost DTensor or other tensor subclass that contains this tensor.
    """

    name: str
    tensor: Tensor
    kind: Kind
    owner: object
    container: object
    key: object
    aliases: tuple[str, ...] = ()
    tied: tuple[Tensor, ...] = ()
    box: Box | None = None
    replicas: Ranks = ()
    whole: Whole | None = None
    wrapper: Tensor | None = None

    @property
    def held(self) -> Tensor:
        """The tensor that the module or the optimizer holds."""
        return self.tensor if self.wrapper is None else self.wrapper


class Sink:
    """The receiver of a walk's tensors."""

    def add(self, name: str, tensor: Tensor, place: Place) -> Any:
        """Take a tensor under a name; return its placeholder for the values."""
        raise NotImplementedError

    def store(self, name: str, value: object) -> Any:
        """Take a large array or large bytes under a name; return the placeholder for the values, or the value
        itself in a sink that stores no leaves."""
        return value

    def absent(self, name: str, container: object, key: object) -> None:
        """Record that this place holds no tensor now."""

    def guard(self, container: Sized) -> None:
        """Make the plan depend on the container's length."""

    def anchor(self, container: object, key: object, value: object) -> None:
        """Make the plan depend on the identity of `container[key]` (or of that attribute)."""


class Walk(Sink):
    """One walk of the state.

    leaves: in the order in which they were found.
    value: the values; encode them at once, because they may contain live containers.
    in_values: the names of leaves inside values. Each later read of the values must return them again.
    owners: parameter -> (module or optimizer, key) of its first owner.
    replicas: parameter -> the ranks that hold it too by declaration (DDP); without DTensors.
    flat: parameter -> this rank's slice of a parameter that FSDP1 flattens.
    guards, anchors: a plan is valid while each guarded container has its length, each anchor (container, key,
        object) still holds its object, and each leaf is in its place.
    """

    def __init__(self) -> None:
        self.leaves: list[LiveLeaf] = []
        self.value: dict[str, Any] = {}
        self.owners: dict[Tensor, tuple[str, str]] = {}
        self.replicas: dict[Tensor, Ranks] = {}
        self.flat: dict[object, FlatPiece] = {}
        self.meshes = Meshes()
        self.guards: list[tuple[Sized, int]] = []
        self.anchors: list[tuple[object, object, object]] = []
        self.named: dict[str, LiveLeaf] = {}
        self.refs: dict[str, LeafRef] = {}
        self.in_values: Set[str] = frozenset()
        self._by_id: dict[int, LiveLeaf] = {}
        self._by_address: dict[int, list[LiveLeaf]] = {}

    def guard(self, container: Sized) -> None:
        self.guards.append((container, len(container)))

    def absent(self, name: str, container: object, key: object) -> None:
        self.anchor(container, key, None)

    def anchor(self, container: object, key: object, value: object) -> None:
        if container is not None:
            self.anchors.append((container, key, value))

    def is_valid(self) -> bool:
        """Whether modules and optimizers still hold the parameters and buffers that this walk found. The
        state's own code may have replaced them, even during the walk."""
        return self._hold(leaf for leaf in self.leaves if leaf.kind in ("parameter", "buffer"))

    def all_leaves_valid(self) -> bool:
        """The same for every leaf that has a container."""
        return self._hold(leaf for leaf in self.leaves if leaf.container is not None)

    def _hold(self, leaves: Iterable[LiveLeaf]) -> bool:
        # A wrapper may return new inner tensors at each access.
        places = [(e.container, e.key, e.tensor) for e in leaves if not isinstance(e.container, Tensor)]
        return _native.Standing(self.guards, [*places, *self.anchors]).stands()

    def add(self, name: str, tensor: Tensor, place: Place) -> LeafRef:
        """Take a tensor under a name. Raises StateError if it cannot be saved exactly."""
        known = self._by_id.get(id(tensor))
        if known is None and is_wrapper(tensor):
            ref = self._add_wrapper(name, tensor, place)
        else:
            ref = self._add_plain(name, tensor, place, known)
        self.refs[name] = ref
        return ref

    def store(self, name: str, value: object) -> LeafRef:
        """Add a leaf that is never tied to another: a value in two places is restored as two values."""
        if name in self.named:
            refuse(name, "is the name of two values of the state", "Rename one of them.")
        tensor, about = stored(value, name)
        self.leaves.append(LiveLeaf(name, tensor, "value", None, None, None))
        self.named[name] = self.leaves[-1]
        self.refs[name] = LeafRef(name, about)
        return self.refs[name]

    def _add_plain(self, name: str, tensor: Tensor, place: Place, known: LiveLeaf | None) -> LeafRef:
        about = facts(tensor, place)
        if name in self.named:
            refuse(name, "is the name of two tensors of the state", "Rename one of them.")
        if known is None:
            check(tensor, name)
            there = self._by_address.setdefault(tensor.data_ptr(), [])
            ties = [leaf for leaf in there if same_memory(leaf.tensor, tensor)]
            known = ties[0] if ties else None
            if known is None:
                known = LiveLeaf(name, tensor, place.kind, place.owner, place.container, place.key)
                known.box, known.replicas, known.whole = self._piece(tensor, place)
                known.wrapper = place.wrapper
                self.leaves.append(known)
                there.append(known)
                self._by_id[id(tensor)] = self.named[name] = known
                return LeafRef(name, about)
            about["shares"] = True
        known.aliases += (name,)
        known.tied += (tensor,) if place.container is not None else ()
        self.anchor(place.container, place.key, tensor)
        self.named[name] = known
        return LeafRef(name, about)

    def _piece(self, tensor: Tensor, place: Place) -> TensorBox:
        """Return the slice that a plain tensor is, and the ranks that hold it too. A gradient that is still
        to be used belongs to this rank alone."""
        parameter = place.parameter
        like: Any = place.owner if place.kind == "gradient" else parameter
        if (flat := self.flat.get(like)) is not None and tensor.shape == like.shape:
            return flat.piece
        if parameter is None or place.piece != TensorBox(None, ()):
            return place.piece if place.kind != "gradient" else TensorBox(place.piece.box, ())
        if not is_sharded(parameter):
            return TensorBox(None, self.replicas.get(parameter, ()))
        # A plain tensor in a DTensor's optimizer state may belong to the local shard alone. A step counter,
        # which has no dimension, is the same on all ranks of the mesh.
        return TensorBox(None, self.meshes.ranks(parameter) if tensor.ndim == 0 else ())

    def _add_wrapper(self, name: str, tensor: Tensor, place: Place) -> LeafRef:
        parts, context = flatten(tensor, name)
        self.anchor(place.container, place.key, tensor)
        container = None if place.container is None else tensor
        wrapper = tensor if place.wrapper is None else place.wrapper
        for attribute in parts:
            inner = getattr(tensor, attribute)
            # Inner tensors have sizes of their own, so the outer slice does not apply to them.
            piece = TensorBox(None, place.piece.replicas)
            if is_sharded(tensor):
                piece = self.meshes.piece(tensor, inner, name)
            where = place._replace(container=container, key=attribute, piece=piece, wrapper=wrapper)
            self.add(part_name(name, attribute), inner, where)
        return LeafRef(name, wrapper_facts(name, tensor, parts, context, place))

    def check_shared_memory(self) -> None:
        """Raise StateError for tensors that share part of their memory and that a restore may have to create:
        the created ones would no longer change together."""
        tensors = (leaf for leaf in self.leaves if leaf.kind != "value")  # a value is restored by itself
        spans = sorted((*span(leaf.tensor), leaf.name, leaf.kind) for leaf in tensors)
        end, holder, kind = -1, "", ""
        for start, stop, name, this in spans:
            if start < end and not {kind, this} <= {"parameter", "buffer"}:
                refuse(name, f"shares part of its memory with {holder}", "Clone one of them.")
            if stop > end:
                end, holder, kind = stop, name, this


class Refresh(Sink):
    """The sink between two walks: checks that the tensors are those of the last walk."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self.seen: set[str] = set()

    def absent(self, name: str, container: object, key: object) -> None:
        if name in self._walk.refs:
            raise Restructured(name)

    def add(self, name: str, tensor: Tensor, place: Place) -> LeafRef:
        """Return the reference of the last walk. Raises Restructured if this is another tensor."""
        leaf = self._walk.named.get(name)
        ref = self._walk.refs.get(name)
        if ref is None:
            raise Restructured(name)
        self.seen.add(name)
        if is_wrapper(tensor):
            return self._refresh_wrapper(ref, tensor, place)
        if leaf is None:
            raise Restructured(name)
        if leaf.tensor is tensor:
            return ref
        if leaf.container is None and leaf.name == name:
            same = leaf.tensor.shape == tensor.shape and leaf.tensor.dtype == tensor.dtype
            same = same and leaf.box == place.piece.box
            if not same or leaf.tensor.device != tensor.device or strides(leaf.tensor) != strides(tensor):
                raise Restructured(name)
            check(tensor, name)
            leaf.tensor = tensor
        elif not same_memory(leaf.tensor, tensor):
            raise Restructured(name)
        return ref

    def store(self, name: str, value: object) -> LeafRef:
        """Take a value again. Raises Restructured if the last walk has no value of this name and size."""
        leaf = self._walk.named.get(name)
        if leaf is None or leaf.kind != "value":
            raise Restructured(name)
        tensor, about = stored(value, name)
        same = leaf.tensor.shape == tensor.shape and leaf.tensor.dtype == tensor.dtype
        if not same or strides(leaf.tensor) != strides(tensor):
            raise Restructured(name)
        leaf.tensor, self._walk.refs[name] = tensor, LeafRef(name, about)
        self.seen.add(name)
        return self._walk.refs[name]

    def _refresh_wrapper(self, ref: LeafRef, tensor: Tensor, place: Place) -> LeafRef:
        parts, context = flatten(tensor, ref.name)
        if dict(ref.about) != wrapper_facts(ref.name, tensor, parts, context, place):
            raise Restructured(ref.name)
        for attribute in parts:
            inner = getattr(tensor, attribute)
            if is_sharded(tensor) and place.container is None:
                place = place._replace(piece=self._walk.meshes.piece(tensor, inner, ref.name))
            self.add(part_name(ref.name, attribute), inner, place)
        return ref


def facts(tensor: Tensor, place: Place) -> dict[str, object]:
    """Return the facts, beyond its leaf, that are needed to create a plain tensor again."""
    about: dict[str, object] = {}
    if tensor.device != place.home and tensor.device.type != place.home.type:
        about["device"] = tensor.device.type
    if type(tensor) is not Tensor:
        about["class"] = kind_of(tensor)
    if tensor.requires_grad and tensor.is_leaf:
        about["requires_grad"] = True
    return about


def wrapper_facts(
    name: str, tensor: Tensor, parts: list[str], context: object, place: Place
) -> dict[str, object]:
    """The same for a tensor subclass that wraps others: its class, its parts, and how to assemble them."""
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    if is_sharded(tensor):
        context = own_placements(tensor, place.parameter, name)
    return facts(tensor, place) | {"parts": list(parts), "context": context, "shape": shape, "stride": stride}


def leaf_names(name: str, ref: LeafRef) -> list[str]:
    """Return the names of a reference's leaves: several if a tensor subclass wraps several tensors."""
    if "parts" not in ref.about:
        return [name]
    return [part_name(name, part) for part in part_names(ref.about)]


def part_names(about: Mapping[str, object]) -> list[str]:
    """Return the attributes of a wrapping tensor that hold its parts."""
    parts = about.get("parts")
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise DamagedError("The snapshot holds a tensor with unknown parts. It cannot be used.")
    return parts


# Names


def step_name(parent: nn.Module, child: str) -> str:
    """Return the part of a name that a child adds: "" if the parent only wraps the child."""
    if child in _WRAPPED and any(kind.__name__ == _WRAPPED[child] for kind in type(parent).__mro__):
        return ""
    if child == "module" and isinstance(parent, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return ""
    return child


def unowned(group: int, index: int) -> str:
    """Return the name of a parameter that no attached module owns."""
    return f"group{group}[{index}]"


# Restore


@dataclass(frozen=True)
class Saved:
    """A snapshot that is being read: its leaves, its decoded values, and `tensor`, which returns a leaf as a
    row-major CPU tensor with the leaf's dtype and shape. A restore copies it, and may keep those of `own`."""

    leaves: Mapping[str, Leaf]
    value: dict[str, Any]
    tensor: Callable[[str], Tensor]
    own: Set[str] = frozenset()

    @functools.cached_property
    def names(self) -> dict[str, str]:
        """Each name and alias of each leaf -> the name under which it is stored."""
        aliases = {alias: leaf.name for leaf in self.leaves.values() for alias in leaf.aliases}
        return {name: name for name in self.leaves} | aliases


def is_plain(tensor: Tensor) -> bool:
    """Whether bytes may be copied into, or out of, the memory of the tensor as they are in a file."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_inference()
    )


class Uploads(Protocol):
    """Batched copies to devices: a single copy would wait for its device each time."""

    def takes(self, live: Tensor) -> bool:
        """Whether the tensor is on a device that these copies support."""

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Fill each live tensor from its source in host memory, as `fill` does; wait for the devices."""


class Filling:
    """One restore, with the list of (leaf name, live tensor) filled so far. Copies between plain host
    tensors, and copies that `uploads` takes, wait for `make_copies`, unless `at_once` is set."""

    def __init__(self, saved: Saved, uploads: Uploads | None = None) -> None:
        self.saved = saved
        self.at_once = False
        self._uploads = uploads
        self._uploaded: list[tuple[Tensor, Tensor]] = []
        self._live: dict[str, Tensor] = {}
        self._taken: dict[int, list[Tensor]] = {}
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._meshes = Meshes()
        self.filled: list[tuple[str, Tensor]] = []

    def make_copies(self) -> None:
        """Make all pending copies."""
        uploaded, self._uploaded = self._uploaded, []
        if self._uploads is not None and uploaded:
            self._uploads.copy(uploaded)
        pairs, self._copies = self._copies, []
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
        """Return the leaf with a name or alias. Raises DamagedError for an unknown name."""
        try:
            return self.saved.leaves[self.saved.names[name]]
        except KeyError:
            raise DamagedError(
                f"The snapshot refers to {name!r} and does not contain it. It cannot be used."
            ) from None

    def add_value(self, name: str, value: object) -> None:
        """Record a value that was made from the bytes of a leaf."""
        leaf = self.leaf(name)
        if leaf.name not in self._live:
            self._becomes(leaf, stored(value, name)[0])

    def fill(self, name: str, live: Tensor) -> None:
        """Fill a live tensor that fits, unless its leaf was used already."""
        leaf = self.leaf(name)
        if leaf.name not in self._live:
            self._copy(leaf, live)
            self._becomes(leaf, live)

    def _copy(self, leaf: Leaf, live: Tensor) -> None:
        source = self.saved.tensor(leaf.name)
        if same_memory(live, source):  # it was read into the live tensor
            return
        if self.at_once or not live.numel():
            fill(live, source)
        elif self._uploads is not None and self._uploads.takes(live):
            self._uploaded.append((live, source))
        elif is_plain(live) and is_plain(source) and live.dtype == source.dtype:
            self._copies.append((live, source))
        else:
            fill(live, source)

    def _becomes(self, leaf: Leaf, live: Tensor) -> None:
        self._live[leaf.name] = live
        self._taken.setdefault(live.data_ptr(), []).append(live)
        self.filled.append((leaf.name, live))

    def place(
        self,
        ref: LeafRef,
        name: str,
        live: object,
        home: torch.device,
        like: Tensor | None = None,
        box: Box | None = None,
    ) -> Tensor:
        """Return the tensor that belongs in the place of `ref`: the tensor that already has this leaf; else
        `live`, filled, if it fits; else a new tensor as recorded, on the recorded type of device or on
        `home`. `box` is the slice that `live` is."""
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
        if isinstance(live, Tensor) and self._usable(live, box, leaf, device, str(about.get("class", ""))):
            self.fill(name, live)
            return live
        if leaf.name in self.saved.own and leaf.stride is None and device.type == "cpu":
            plain = self.saved.tensor(leaf.name)
        else:
            plain = make(leaf, device)
            self._copy(leaf, plain)
        made = dress(plain, about, like)
        self._becomes(leaf, made)
        return made

    def _usable(
        self, live: Tensor, box: Box | None, leaf: Leaf, device: torch.device, recorded_class: str
    ) -> bool:
        if is_wrapper(live) or live.layout is not torch.strided or not fits(leaf, live, box):
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
            inner, box = getattr(live, attribute, None) if same else None, None
            if same and isinstance(live, Tensor) and isinstance(inner, Tensor) and is_sharded(live):
                box = self._meshes.piece(live, inner, name).box
            parts[attribute] = self.place(
                LeafRef(attribute), part_name(name, attribute), inner, home, box=box
            )
            same = same and parts[attribute] is inner
        if same and isinstance(live, Tensor):
            return live
        if like is not None and is_sharded(like):
            return assembled(about, parts["_local_tensor"], like, name)
        return assemble(about, parts, like)


# Large arrays and bytes among values, stored as leaves: their bytes are in the shard, with digest and
# checksum, and not in the JSON of the values. A reference to such a leaf holds the type of the value in
# `about["value"]` and, for an array, dtype, shape and order.


# For fewer bytes, a leaf (its row in the plan, its digest, its place in the image) costs more than it saves.
LARGE_BYTES = 64 << 10
_KEY = "value"
_ARRAY_DTYPE = re.compile(r"[<>|=][biufcSUMm]\d{1,9}(\[\d{0,9}[A-Za-z]{1,3}\])?")


def is_large(value: object) -> bool:
    """Whether a value is stored as a leaf."""
    if type(value) is np.ndarray:
        return value.nbytes > LARGE_BYTES
    return type(value) in (bytes, bytearray) and len(value) > LARGE_BYTES  # type: ignore[arg-type]


def is_stored(ref: LeafRef) -> bool:
    """Whether a reference stands for a stored value, not for a tensor."""
    return _KEY in ref.about


def stored(value: Any, name: str) -> tuple[Tensor, dict[str, object]]:
    """Return a tensor with a large value's bytes, and the facts for its reference. Does not copy an array in
    row-major or column-major order. Raises StateError for an array without an exact encoding."""
    if type(value) is not np.ndarray:
        # Copied, because a bytearray cannot be resized while a buffer of it is exported.
        array = np.frombuffer(bytes(value), dtype=np.uint8)
        return _tensor(array), {_KEY: [type(value).__name__]}
    try:
        check_array(value)
    except ValueError as error:
        refuse(name, f"is {error}", "Keep its content in arrays of numbers.")
    flags = value.flags
    fortran = value.ndim > 1 and flags.f_contiguous and not flags.c_contiguous
    array = value if flags.c_contiguous or fortran else np.ascontiguousarray(value)
    return _tensor(array), {_KEY: ["numpy.array", value.dtype.str, list(value.shape), fortran]}


def _tensor(array: np.ndarray[Any, Any]) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about read-only arrays: this tensor is never written
        try:
            tensor = torch.from_numpy(array)
        except (TypeError, ValueError):  # a dtype that torch lacks, such as text and dates
            tensor = None
        if tensor is None or tensor.dtype not in DTYPE_NAMES:
            tensor = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return tensor


def check_array(array: np.ndarray[Any, Any]) -> None:
    """Raise ValueError for an array without an exact encoding."""
    if array.dtype.hasobject or not _ARRAY_DTYPE.fullmatch(array.dtype.str):
        raise ValueError(f"an array of dtype {array.dtype} has no exact encoding")


def array_dtype(text: object) -> np.dtype[Any]:
    """Return the dtype with this `str`. Raises ValueError for other text."""
    if not isinstance(text, str) or not _ARRAY_DTYPE.fullmatch(text):
        raise ValueError(f"{text!r} is not a dtype of an array")
    return np.dtype(text)


def check_stored(about: Mapping[str, object], num_bytes: int) -> None:
    """Raise ValueError or TypeError unless `num_bytes` bytes are a value of the recorded type."""
    facts = about[_KEY]
    if not isinstance(facts, list) or not facts:
        raise ValueError(f"{facts!r} is not a type of value")
    kind, *rest = facts
    if kind == "numpy.array" and len(rest) == 3:
        dtype, shape = array_dtype(rest[0]), rest[1]
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError("an invalid shape")
        if len(shape) > 64 or dtype.itemsize * int(np.prod(shape, dtype=object)) != num_bytes:
            raise ValueError("an array of another length")
    elif kind not in ("bytes", "bytearray") or rest:
        raise ValueError(f"{kind!r} is not a type of value")


def value_of(about: Mapping[str, Any], source: Tensor) -> Any:
    """Return the stored value, with memory of its own. `source`: its leaf, row-major."""
    check_stored(about, source.numel() * source.element_size())
    kind, *rest = about[_KEY]
    flat = source.contiguous().reshape(-1).view(torch.uint8).numpy()
    if kind != "numpy.array":
        return flat.tobytes() if kind == "bytes" else bytearray(flat)
    text, shape, fortran = rest
    array = flat.copy().view(array_dtype(text)).reshape(shape)
    return np.asfortranarray(array) if fortran else array
