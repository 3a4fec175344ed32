"""The leaves of a state: names, ties, and what must stay as it is for a plan to stand.

Owns the rules that a tensor is stored once however many names it has, that no name stands twice, and that a
parameter is called in an optimizer's state by the key under which the module that owns it holds it; and the
two sinks into which a state is walked: `Walk` for all of it, `Refresh` for the values alone between two
walks.

On the way back (`Filling`), owns which live tensor a leaf has become, so that ties stay ties and what was
apart stays apart, and the copies that are still to be made. Tensors handed out by a snapshot are views of
memory that goes: they are copied and never kept.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence, Set, Sized
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from flashckpt import _native
from flashckpt.errors import DamagedError
from flashckpt.format.layout import Box, Leaf
from flashckpt.format.typed import LeafRef
from flashckpt.state.sharding import FlatPiece, Meshes, Ranks, TensorBox, Whole, assembled, own_placements
from flashckpt.state.stored import stored
from flashckpt.state.tensors import (
    assemble,
    check,
    dress,
    fill,
    fits,
    flatten,
    is_sharded,
    is_wrapper,
    kind_of,
    make,
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
    """The state has other tensors, or tensors in other places, than at the last walk: walk again."""


class Place(NamedTuple):
    """Where a tensor was found: `container[key]` or `getattr(container, key)`, None where it is made
    anew each time it is asked for. `home` is the device a tensor here is on if nothing is recorded;
    `parameter` is the one that an optimizer's state belongs to; `piece` is what is known of what the tensor
    is a part of, `wrapper` the outermost tensor that is made of it and others."""

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
    """One tensor of the live state. `aliases` are its further names, `tied` the objects found under those
    that have a place of their own: it, or other tensors over its memory. Where `container` is None the
    tensor is made anew by its owner, and `Tree.values` puts the newest one here. `box` says where in a larger
    tensor this lies, None where it is the whole. `replicas` are the global ranks, this one among them, that
    hold the very same by declaration, in order; empty where no other does: the leaf is kept by rank. `whole`
    is what ranks that have other parts of the tensor must say alike of it. `wrapper` is the DTensor, or other
    tensor made of tensors, that this is a part of, the outermost: what modules and optimizers hold."""

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
        """What the module or the optimizer holds."""
        return self.tensor if self.wrapper is None else self.wrapper


class Sink:
    """What a walk hands its tensors to."""

    def add(self, name: str, tensor: Tensor, place: Place) -> Any:
        """Take a tensor under a name; gives what stands for it among the values."""
        raise NotImplementedError

    def store(self, name: str, value: object) -> Any:
        """Take a large array or large bytes under a name; gives what stands for it among the values: itself
        in a sink that keeps everything there."""
        return value

    def absent(self, name: str, container: object, key: object) -> None:
        """There is no tensor in this place now."""

    def guard(self, container: Sized) -> None:
        """The plan stands only while the container keeps its length."""

    def anchor(self, container: object, key: object, value: object) -> None:
        """The plan stands only while `container[key]` (or that attribute) is this very object."""


class Walk(Sink):
    """One walk of the state: its leaves in the order in which they were found, and its value, for
    `encode_json` at once: it may hold live containers. `asked` are the names of leaves that stand among
    values, and are asked for again with them. `owners`: which module or optimizer owns a parameter, and under
    which key: the first that was found. `replicas`: the ranks that hold a parameter too because it was
    declared so (DDP), of parameters that are no DTensors; `flat` is what FSDP1 has here of one. A plan of it
    stands while every guard's container has its length, every anchor (container, key, object) holds that very
    object, and every leaf is where it was."""

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
        self.asked: Set[str] = frozenset()
        self._by_id: dict[int, LiveLeaf] = {}
        self._by_address: dict[int, list[LiveLeaf]] = {}

    def guard(self, container: Sized) -> None:
        self.guards.append((container, len(container)))

    def absent(self, name: str, container: object, key: object) -> None:
        self.anchor(container, key, None)

    def anchor(self, container: object, key: object, value: object) -> None:
        if container is not None:
            self.anchors.append((container, key, value))

    def stand(self) -> bool:
        """Whether modules and optimizers still hold the parameters and buffers that were found in them: the
        state's own code may have put others there since, also in this very walk."""
        return self._hold(leaf for leaf in self.leaves if leaf.kind in ("parameter", "buffer"))

    def stand_whole(self) -> bool:
        """The same of every leaf that has a place."""
        return self._hold(leaf for leaf in self.leaves if leaf.container is not None)

    def _hold(self, leaves: Iterable[LiveLeaf]) -> bool:
        # What a wrapper is made of, it may make anew each time it is asked.
        places = [(e.container, e.key, e.tensor) for e in leaves if not isinstance(e.container, Tensor)]
        return _native.Standing(self.guards, [*places, *self.anchors]).stands()

    def add(self, name: str, tensor: Tensor, place: Place) -> LeafRef:
        """Take a tensor under a name. Raises StateError for what cannot be saved exactly."""
        known = self._by_id.get(id(tensor))
        if known is None and is_wrapper(tensor):
            ref = self._add_wrapper(name, tensor, place)
        else:
            ref = self._add_plain(name, tensor, place, known)
        self.refs[name] = ref
        return ref

    def store(self, name: str, value: object) -> LeafRef:
        """A leaf that shares its memory with no other: a value in two places comes back as two."""
        if name in self.named:
            refuse(name, "stands twice: the state holds the same name for two values", "Rename one of them.")
        tensor, about = stored(value, name)
        self.leaves.append(LiveLeaf(name, tensor, "value", None, None, None))
        self.named[name] = self.leaves[-1]
        self.refs[name] = LeafRef(name, about)
        return self.refs[name]

    def _add_plain(self, name: str, tensor: Tensor, place: Place, known: LiveLeaf | None) -> LeafRef:
        about = facts(tensor, place)
        if name in self.named:
            refuse(name, "stands twice: the state holds the same name for two tensors", "Rename one of them.")
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
        """What a plain tensor is a part of, and who has it too. A gradient that is still to be used is
        declared to be nobody else's."""
        parameter = place.parameter
        like: Any = place.owner if place.kind == "gradient" else parameter
        if (flat := self.flat.get(like)) is not None and tensor.shape == like.shape:
            return flat.piece
        if parameter is None or place.piece != TensorBox(None, ()):
            return place.piece if place.kind != "gradient" else TensorBox(place.piece.box, ())
        if not is_sharded(parameter):
            return TensorBox(None, self.replicas.get(parameter, ()))
        # Of a DTensor's state what is no DTensor itself may be made for the part that is here; a counter of
        # steps, which has no dimension, is the same wherever a part is.
        return TensorBox(None, self.meshes.ranks(parameter) if tensor.ndim == 0 else ())

    def _add_wrapper(self, name: str, tensor: Tensor, place: Place) -> LeafRef:
        parts, context = flatten(tensor, name)
        self.anchor(place.container, place.key, tensor)
        container = None if place.container is None else tensor
        wrapper = tensor if place.wrapper is None else place.wrapper
        for attribute in parts:
            inner = getattr(tensor, attribute)
            # Parts of a part have sizes of their own.
            piece = TensorBox(None, place.piece.replicas)
            if is_sharded(tensor):
                piece = self.meshes.piece(tensor, inner, name)
            where = place._replace(container=container, key=attribute, piece=piece, wrapper=wrapper)
            self.add(part_name(name, attribute), inner, where)
        return LeafRef(name, wrapper_facts(name, tensor, parts, context, place))

    def check_shared_memory(self) -> None:
        """Refuse tensors that would have to be made anew and that share part of their memory with
        another: once made, they would no longer change together. Raises StateError."""
        apart = (leaf for leaf in self.leaves if leaf.kind != "value")  # made anew as a value of its own
        spans = sorted((*span(leaf.tensor), leaf.name, leaf.kind) for leaf in apart)
        end, holder, kind = -1, "", ""
        for start, stop, name, this in spans:
            if start < end and not {kind, this} <= {"parameter", "buffer"}:
                refuse(name, f"shares part of its memory with {holder}", "Clone one of them.")
            if stop > end:
                end, holder, kind = stop, name, this


class Refresh(Sink):
    """Takes the tensors of a state between two walks: they must be those of the last one."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self.seen: set[str] = set()

    def absent(self, name: str, container: object, key: object) -> None:
        if name in self._walk.refs:
            raise Restructured(name)

    def add(self, name: str, tensor: Tensor, place: Place) -> LeafRef:
        """The reference of the last walk. Raises Restructured if this is another tensor."""
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
        """Raises Restructured if there was no such value, or one of another size."""
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
    """What has to be known to make a plain tensor anew, beyond its leaf."""
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
    """The same for a subclass that wraps others: its class, its parts, and how they go together."""
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    if is_sharded(tensor):
        context = own_placements(tensor, place.parameter, name)
    return facts(tensor, place) | {"parts": list(parts), "context": context, "shape": shape, "stride": stride}


def leaf_names(name: str, ref: LeafRef) -> list[str]:
    """The leaves that a reference stands for: more than one where a subclass wraps several tensors."""
    if "parts" not in ref.about:
        return [name]
    return [part_name(name, part) for part in part_names(ref.about)]


def part_names(about: Mapping[str, object]) -> list[str]:
    """The attributes in which a wrapping tensor has its parts."""
    parts = about.get("parts")
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise DamagedError("The snapshot holds a tensor of unknown parts. It cannot be used.")
    return parts


# Names


def step_name(parent: nn.Module, child: str) -> str:
    """The part of a name that a child adds: nothing where the parent only wraps it."""
    if child in _WRAPPED and any(kind.__name__ == _WRAPPED[child] for kind in type(parent).__mro__):
        return ""
    if child == "module" and isinstance(parent, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return ""
    return child


def unowned(group: int, index: int) -> str:
    """A parameter that no attached module owns."""
    return f"group{group}[{index}]"


# The way back


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


class Uploads(Protocol):
    """Copies to devices, many at a time: each one alone would wait for its device."""

    def takes(self, live: Tensor) -> bool:
        """Whether the tensor is on a device that is known here."""

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Fill each live tensor from its source in host memory, as `fill`; waits for the devices."""


class Filling:
    """One restore: what is filled already, under which leaf's name. Copies between plain host tensors, and
    those that `uploads` takes, are put off until `make_copies`, unless `at_once` is set."""

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
        """Make every copy that was put off."""
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
        """The leaf that is stored under a name or one of its further names. Raises DamagedError."""
        try:
            return self.saved.leaves[self.saved.names[name]]
        except KeyError:
            raise DamagedError(f"The snapshot names {name!r} and does not hold it; it is no use.") from None

    def made(self, name: str, value: object) -> None:
        """This was made of the bytes that are stored under a name."""
        leaf = self.leaf(name)
        if leaf.name not in self._live:
            self._becomes(leaf, stored(value, name)[0])

    def fill(self, name: str, live: Tensor) -> None:
        """Fill a live tensor that fits, once."""
        leaf = self.leaf(name)
        if leaf.name not in self._live:
            self._copy(leaf, live)
            self._becomes(leaf, live)

    def _copy(self, leaf: Leaf, live: Tensor) -> None:
        source = self.saved.tensor(leaf.name)
        if self.at_once or not live.numel():
            fill(live, source)
        elif self._uploads is not None and self._uploads.takes(live):
            self._uploaded.append((live, source))
        elif _is_plain(live) and _is_plain(source) and live.dtype == source.dtype:
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
        """The tensor that belongs where `ref` stands: `live`, filled, if it can be; the tensor that the
        leaf has become already; or a new one, as recorded, on `home` or the device class recorded. `box` is
        that of `live`."""
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
