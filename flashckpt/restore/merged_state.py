"""The state of a step, put together for a live state of another layout: which boxes of which tensors it
takes, and its values.

Owns what belongs to everybody and what to a rank. Parameters and what an optimizer keeps of them go by name,
wherever they rest. All else (schedulers, counters, buffers that differ) is a rank's own: rank r takes that of
rank r, or where there was none, of r modulo the old number. Reads no bytes of tensors and changes nothing
live.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from flashckpt.capture.plan import local
from flashckpt.errors import DamagedError, MismatchError, StateError
from flashckpt.format.layout import Box, Leaf
from flashckpt.format.typed import LeafRef, children, encode_json
from flashckpt.restore.saved_rank import SavedRank, SavedState
from flashckpt.restore.step_leaves import BoxRegion, Index, Parts, StepTensor
from flashckpt.restore.step_ranks import StepRanks
from flashckpt.state.leaves import LiveLeaf, leaf_names
from flashckpt.state.modules import ModuleEntry
from flashckpt.state.objects import StateEntry
from flashckpt.state.optimizers import OptimizerEntry
from flashckpt.state.tensors import is_sharded, kind_of
from flashckpt.state.tree import NAMESPACE, PARTIAL, Tree, Walk
from flashckpt.state.values import CONTAINERS, join, rebuild, references

log = logging.getLogger(__name__)

_DTENSOR = ["_local_tensor"]
_SPARSE = ("S", "C")


@dataclass(frozen=True, slots=True)
class TakenLeaf:
    """A leaf as it is to be here, and the pieces that make it up."""

    leaf: Leaf
    parts: Parts


class MergedState:
    """What a live state takes of a step: after `merge`, `leaves` and `value` (as `Tree.walk` has it)."""

    def __init__(self, tree: Tree, live: Walk, ranks: StepRanks, rank: int, world: int) -> None:
        self._tree, self._live, self._ranks, self._rank, self._world = tree, live, ranks, rank, world
        self._saved: dict[int, SavedRank] = {}
        self._wanted: list[tuple[Leaf, StepTensor, BoxRegion]] = []
        self._names: set[str] = set()
        self._used: set[str] = set()
        self._holder: dict[str, int] = {}
        self.leaves: list[TakenLeaf] = []
        self.value: dict[str, Any] = {}

    def merge(self) -> None:
        """Raises MismatchError where pieces do not go together, DamagedError where values do not have the
        form they were written in."""
        try:
            self._take_live()
            entries = {}
            for name, entry in self._tree.entries.items():
                saved = self._having(name)
                if saved is not None:
                    entries[name] = self._entry(entry, saved)
            if self._world == 1:
                entries = self._strangers() | entries
            self.value = {"entries": entries, NAMESPACE: self._gradients()}
            if PARTIAL in self.source.values["state"]:
                self.value[PARTIAL] = True
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, StopIteration) as error:
            raise DamagedError(
                f"The values of the step do not have the form they were written in ({error!r}). It cannot be "
                "used; nothing was loaded."
            ) from error
        self._find()

    # ---- tensors

    def saved(self, rank: int) -> SavedRank:
        """The values of a rank of the step."""
        if rank not in self._saved:
            record = self._ranks[rank]
            self._saved[rank] = SavedRank(rank, record.values, self._ranks.renamed[rank])
        return self._saved[rank]

    @cached_property
    def source(self) -> SavedRank:
        """The rank whose own things this one takes."""
        return self.saved(self._ranks.source)

    def _take_live(self) -> None:
        """Parameters and buffers that are here, under the names that they have here."""
        lives = [leaf for leaf in self._live.leaves if leaf.kind in ("parameter", "buffer")]
        names = [[leaf.name, *leaf.aliases] for leaf in lives]
        self._ranks.tensors([name for each in names for name in each])
        for leaf, mine in zip(lives, names, strict=True):
            there = [(name, found) for name in mine if (found := self._ranks.leaves.get(name)) is not None]
            # Tied as they were saved: what is another tie here is told by the comparison.
            for first, group in _ties(there).items():
                self._take(leaf, group, first)
        self._take_absent()

    def _take(self, live: LiveLeaf, names: list[str], tensor: StepTensor) -> None:
        if live.kind == "parameter":
            self._check_shared(tensor)
        self._holder.update(dict.fromkeys(names, self._nearest(tensor)))
        here = _whole_shape(live)
        shape = here if self._was(names[0], tensor) == self._is(live.tensor, here) else tensor.shape
        region = BoxRegion((0,) * len(shape), shape)
        if live.box is not None and live.box.shape == shape:
            region = BoxRegion(live.box.start, tuple(local(live.tensor).shape))
        stored = tensor.leaf
        stride = stored.stride if region.shape == stored.shape else None
        self._want(names[0], tensor, region, stride, tuple(names[1:]), shape)

    # What a parameter was and is, but for FSDP1, which lays it out in one dimension: then it is taken as it
    # lies here.

    def _was(self, name: str, tensor: StepTensor) -> list[Any]:
        return self.saved(self._nearest(tensor)).flat.get(name, list(tensor.shape))  # type: ignore[no-any-return]

    def _is(self, live: Tensor, here: Index) -> list[Any]:
        flat = self._live.flat.get(live)
        return list(here) if flat is None else flat.whole

    def _check_shared(self, tensor: StepTensor) -> None:
        """MismatchError for a parameter of which each rank has another, where ranks are not those of
        before."""
        if self._world == self._ranks.record.world:
            return
        if not tensor.is_one:
            self._ranks.read(range(self._ranks.record.world))  # any may have other bytes of it
        if tensor.is_by_rank:
            raise MismatchError(
                f"{tensor.name} is whole on ranks {_some(tensor.ranks)} and has other bytes on each: with "
                f"{self._world} ranks where there were {self._ranks.record.world}, nothing says which one "
                "counts. Nothing was loaded. Start with as many ranks as made the step.",
                differences=((tensor.name, "another one on each rank", "one tensor"),),
            )

    def _take_absent(self) -> None:
        """Leaves of modules that are not here: buffers that are made from the snapshot, and in one process,
        which has all there is, whatever else there was."""
        names = {name for leaf in self._live.leaves for name in (leaf.name, *leaf.aliases)}
        ranks = range(self._ranks.record.world) if self._world == 1 else [self._ranks.source]
        for rank in ranks:
            saved = self.saved(rank)
            for part, value in saved.entries.items():
                if value["kind"] != "module":
                    continue
                extra = {leaf for ref in _extra_references(value) for leaf in leaf_names(*ref)}
                made = {*value.get("transient", ()), *value.get("resized", ())}
                for leaf in self._leaves_of(rank, part):
                    if leaf.name in names or leaf.name in extra or leaf.name in self._names:
                        continue
                    if self._world == 1 or leaf.name in made or self._is_unmade(leaf.name):
                        self._own(leaf.name, rank)

    def _leaves_of(self, rank: int, part: str) -> Iterator[Leaf]:
        record = self._ranks[rank]
        for _, leaf, _ in (*record.counted(), *record.elsewhere()):
            if leaf.name.startswith(f"{part}."):
                yield leaf

    def _is_unmade(self, name: str) -> bool:
        """Whether a module here declares a buffer of this name and has not filled it yet."""
        path, _, key = name.rpartition(".")
        for entry in self._tree.entries.values():
            if isinstance(entry, ModuleEntry) and path in entry.modules:
                return entry.modules[path]._buffers.get(key, self) is None
        return False

    def _own(self, name: str, rank: int, here: str | None = None) -> None:
        """A tensor as one rank had it, called `here`."""
        here = here or name
        if here in self._names:
            return
        tensor = self._ranks.leaves.get(self.saved(rank).renamed.get(name, name))
        if tensor is None:
            return  # the comparison says that it is missing
        self._used.add(tensor.name)
        piece = tensor.of_rank(rank)
        if piece is None:
            self._want(here, tensor, BoxRegion((0,) * len(tensor.shape), tensor.shape), tensor.leaf.stride)
            return
        self._names.add(here)
        leaf = replace(piece.leaf, name=here, aliases=self._aliases(piece.leaf, name), offset=-1)
        self.leaves.append(TakenLeaf(leaf, [(piece, piece.region)]))

    def _aliases(self, leaf: Leaf, name: str) -> tuple[str, ...]:
        others = tuple(each for each in (leaf.name, *leaf.aliases) if each != name)
        self._names.update(others)
        return others

    def _want(
        self,
        name: str,
        tensor: StepTensor,
        region: BoxRegion,
        stride: tuple[int, ...] | None,
        aliases: tuple[str, ...] = (),
        shape: Index | None = None,
    ) -> None:
        """`region`: of the tensor in that shape, where it is not taken in its own."""
        if name in self._names:
            return
        shape = shape or tensor.shape
        self._used.add(tensor.name)
        self._names.update((name, *aliases))
        box = None if region.shape == shape else Box(shape=shape, start=region.start)
        leaf = Leaf(
            name=name, dtype=tensor.dtype, shape=region.shape, stride=stride, aliases=aliases, box=box
        )
        own = tensor.of_rank(self._nearest(tensor)) if tensor.is_by_rank else None
        if own is not None:
            as_it_was = replace(own.leaf, name=name, aliases=aliases, offset=-1)
            self.leaves.append(TakenLeaf(as_it_was, [(own, own.region)]))
        else:
            self._wanted.append((leaf, tensor, self._in_step(tensor, region, shape)))

    def _in_step(self, tensor: StepTensor, region: BoxRegion, shape: Index) -> BoxRegion:
        if shape == tensor.shape:
            return region
        flat = tensor.in_one(region, shape)
        # Of more ranks there is more padding: nothing of that is stored, and what is not filled is zero.
        start = min(flat.start[0], tensor.num_elements)
        return BoxRegion((start,), (min(flat.shape[0], tensor.num_elements - start),))

    def _nearest(self, tensor: StepTensor) -> int:
        """The rank whose own things are taken, if it had something of a tensor, else another that had."""
        ranks, source = tensor.ranks, self._ranks.source
        return source if source in ranks else ranks[self._rank % len(ranks)]

    def _find(self) -> None:
        found = self._ranks.find([(tensor.name, region) for _, tensor, region in self._wanted])
        pairs = zip(self._wanted, found, strict=True)
        self.leaves += [TakenLeaf(leaf, parts) for (leaf, _, _), parts in pairs]

    def untaken(self, kinds: Collection[str] = ("module", "optimizer")) -> tuple[str, ...]:
        """Leaves of modules and optimizers, of the ranks that are known, that have no place here. On another
        rank they may have one: another stage of a pipeline."""
        parts = tuple(f"{name}." for name, value in self.source.entries.items() if value["kind"] in kinds)
        left = [name for name in self._ranks.leaves if name.startswith(parts) and name not in self._used]
        return tuple(sorted(name for name in left if self._used.isdisjoint(self._also_called(name))))

    def _also_called(self, name: str) -> tuple[str, ...]:
        tensor = self._ranks.leaves.get(name)
        return () if tensor is None else (tensor.leaf.name, *tensor.leaf.aliases)

    # ---- values

    def _having(self, name: str) -> SavedRank | None:
        """The rank whose entry of this name is taken."""
        if name in self.source.entries:
            return self.source
        return next((s for r in self._ranks.known if name in (s := self.saved(r)).entries), None)

    def _strangers(self) -> dict[str, Any]:
        """Parts of the state that only the step has, with their leaves."""
        found: dict[str, Any] = {}
        for rank in range(self._ranks.record.world):
            for name, value in self.saved(rank).entries.items():
                if name not in self._tree.entries:
                    found.setdefault(name, value)
        return found

    def _entry(self, entry: StateEntry, saved: SavedRank) -> dict[str, Any]:
        value = saved.entries[entry.name]
        if value["kind"] != entry.kind:
            return dict(value)
        if isinstance(entry, ModuleEntry):
            return self._module(entry, value)
        if isinstance(entry, OptimizerEntry):
            return self._optimizer(entry, value, saved)
        found = list(references(value["state"], entry.name))
        self._take_references(iter(found), saved.rank)
        self._tell_differing(entry.name, found)
        return dict(value)

    def _take_references(self, refs: Iterator[tuple[str, LeafRef]], rank: int) -> None:
        for place, ref in refs:
            for leaf in leaf_names(place, ref):
                self._own(self._primary(leaf, rank), rank)

    def _primary(self, name: str, rank: int) -> str:
        """The name under which a rank has stored a leaf that is called `name` there."""
        tensor = self._ranks.leaves.get(name)
        return tensor.leaf_of(rank).name if tensor is not None and rank in tensor.ranks else name

    def _tell_differing(self, name: str, refs: Iterable[tuple[str, LeafRef]]) -> None:
        known = [rank for rank in self._ranks.known if name in self.saved(rank).entries]
        differs = len({encode_json(self.saved(rank).entries[name]) for rank in known}) > 1
        for leaf in (leaf for place, ref in refs for leaf in leaf_names(place, ref)):
            tensor = self._ranks.leaves.get(leaf)
            differs = differs or (tensor is not None and tensor.is_by_rank)
        if differs and self._world != self._ranks.record.world:
            log.warning(
                "%s differs from rank to rank in step %d: rank %d of %d goes on with that of rank %d of %d",
                name, self._ranks.record.step, self._rank, self._world, self._ranks.source,
                self._ranks.record.world,
            )  # fmt: skip

    def _module(self, entry: ModuleEntry, value: dict[str, Any]) -> dict[str, Any]:
        """Lists of names are those of all ranks that are known; extra state is a rank's own."""
        values = [self.saved(r).entries.get(entry.name, {}) for r in self._ranks.known]
        merged = {**value, "frozen": self._all_of("frozen", values)}
        for key in ("transient", "resized"):
            if names := self._all_of(key, values):
                merged[key] = names
        extra: dict[str, Any] = {}
        for rank in (self._ranks.source, *self._ranks.known):
            own = self.saved(rank).entries.get(entry.name, {}).get("extra", {})
            here = {path for path, _ in entry.extras}
            for path, state in own.items():
                if path not in extra and (path in here or self._world == 1):
                    extra[path] = state
                    self._take_references(references(state, join(path, "_extra_state")), rank)
        merged.pop("extra", None)
        merged["flat"] = self._flat_of(entry)
        return {**merged, "extra": extra} if extra else merged

    def _flat_of(self, entry: ModuleEntry) -> dict[str, Any]:
        """Of the parameters that are flat here what they were; and of those that were flat, and are others
        here."""
        found = {}
        for name, parameter in entry.parameters:
            tensor, live = self._ranks.leaves.get(name), self._live.named.get(name)
            if tensor is not None and live is not None:
                was = self._was(name, tensor)
                is_flat = name in entry.flat or name in self.saved(self._nearest(tensor)).flat
                if is_flat and (name in entry.flat or was != self._is(parameter, _whole_shape(live))):
                    found[name] = was
        return found

    def _all_of(self, key: str, values: Sequence[Mapping[str, Any]]) -> list[str]:
        return sorted({name for value in values for name in value.get(key, ())})

    def _optimizer(self, entry: OptimizerEntry, value: dict[str, Any], saved: SavedRank) -> dict[str, Any]:
        name = entry.name
        groups = self._groups_of(name, len(value["params"]))
        live = [[full for full, _, _ in group] for group in entry.places()]
        merged = [
            [*(full for full in mine if full in there), *self._left_over(mine, there)]
            for mine, there in zip(live, groups, strict=False)
        ]
        for number, options in enumerate(value["groups"]):
            self._take_references(references(options, f"{name}.groups.{number}"), saved.rank)
        self._take_references(references(value["shared"], f"{name}.shared"), saved.rank)
        states = self._states(entry)
        return {
            **value,
            "params": merged + [list(each) for each in groups[len(live) :]],
            **states,
        }

    def _groups_of(self, name: str, count: int) -> list[dict[str, None]]:
        """The parameters of each group, of all ranks that are known."""
        groups: list[dict[str, None]] = [{} for _ in range(count)]
        for rank in self._ranks.known:
            value = self.saved(rank).entries.get(name)
            if value is not None and value["kind"] == "optimizer":
                for group, names in zip(groups, value["params"], strict=False):
                    group.update(dict.fromkeys(names))
        return groups

    def _left_over(self, live: Sequence[str], saved: Mapping[str, None]) -> list[str]:
        """What nobody but this process could take."""
        return [name for name in saved if name not in live] if self._world == 1 else []

    def _states(self, entry: OptimizerEntry) -> dict[str, Any]:
        """The state by parameter, in the form in which `OptimizerEntry` writes it."""
        schemas: dict[bytes, tuple[int, Any]] = {}
        columns: list[list[int]] = [[], []]
        scalars: list[Any] = []
        places = [place for group in entry.places() for place in group]
        for index, (full, prefix, parameter) in enumerate(places):
            is_here = entry.steps(parameter) and not (parameter in self._live.flat and not parameter.numel())
            found = self._state_of(entry.name, full) if is_here else None
            if found is None:
                continue
            saved, state = found
            schema = self._as_here(saved, state, prefix, full, entry.name, parameter)
            number, _ = schemas.setdefault(encode_json(schema), (len(schemas), schema))
            columns[0].append(index)
            columns[1].append(number)
            scalars += state.scalars
        return {
            "schemas": [schema for _, schema in schemas.values()],
            "state": columns,
            "scalars": scalars,
        }

    def _state_of(self, optimizer: str, full: str) -> tuple[SavedRank, SavedState] | None:
        rank = self._holder.get(full)
        if rank is None:
            return None
        ranks, tensor = [rank], self._ranks.leaves.get(full)
        if tensor is not None and full in self.saved(rank).flat:
            ranks += [each for each, box in tensor.boxes() if box.num_elements]
            ranks += range(self._ranks.record.world)
        if self.saved(rank).entries.get(optimizer, {}).get("partitioned"):
            ranks += range(self._ranks.record.world)  # one of them has stepped it
        for each in ranks:
            state = self.saved(each).states.get((optimizer, full))
            if state is not None:
                return self.saved(each), state
        return None

    def _as_here(
        self, saved: SavedRank, state: SavedState, prefix: str, full: str, optimizer: str, parameter: Tensor
    ) -> Any:
        """The schema with tensors as they are made for this parameter; takes their leaves."""

        def made(place: str, ref: LeafRef) -> LeafRef:
            leaves = leaf_names(place, ref)
            tensors = [self._ranks.leaves.get(saved.renamed.get(leaf, leaf)) for leaf in leaves]
            here = [prefix + leaf[len(state.prefix) :] for leaf in leaves]
            if len(leaves) == 1 and tensors[0] is not None:
                return self._made(ref, tensors[0], here[0], full, parameter)
            for leaf, name in zip(leaves, here, strict=True):
                self._own(leaf, saved.rank, name)
            return LeafRef("", ref.about)

        return _replaced(state.schema, state.prefix, made)

    def _made(self, ref: LeafRef, tensor: StepTensor, name: str, full: str, like: Tensor) -> LeafRef:
        """One tensor that belongs to a parameter, as it is here: a DTensor where the parameter is one, if it
        has its shape or was one, and else plain."""
        self._check_shared(tensor)
        was_sharded, stored = ref.about.get("parts") == _DTENSOR, tensor.leaf
        parameter, flat, shape = self._ranks.leaves.get(full), self._live.flat.get(like), tensor.shape
        box = flat.piece.box if flat is not None else None
        if parameter is not None and parameter.shape == shape:
            here = box.shape if box is not None else tuple(like.shape)
            shape = here if self._was(full, parameter) == self._is(like, here) else shape
        whole = BoxRegion((0,) * len(shape), shape)
        if is_sharded(like) and (was_sharded or shape == tuple(like.shape)):
            about = self._sharded(ref, tensor, shape, like)
            wanted = replace(stored, name=name, shape=shape, box=None)
            to_make = self._to_make(about, wanted, like, name)
            start = to_make.box.start if to_make.box is not None else whole.start
            stride = stored.stride if to_make.shape == stored.shape else None
            self._want(name, tensor, BoxRegion(start, to_make.shape), stride, shape=shape)
            return LeafRef("", about)
        stride = stored.stride if stored.box is None and stored.shape == shape else None
        region = BoxRegion(box.start, tuple(like.shape)) if box is not None and box.shape == shape else whole
        self._want(name, tensor, region, stride, shape=shape)
        if was_sharded:
            kept = ("device", "requires_grad")
            return LeafRef("", {key: ref.about[key] for key in kept if key in ref.about})
        return LeafRef("", ref.about)

    def _to_make(self, about: Mapping[str, Any], leaf: Leaf, like: Tensor, name: str) -> Leaf:
        try:
            return self._live.meshes.to_make(about, leaf, like, name)
        except (DamagedError, StateError) as error:
            why = f"its placements {about['context']} are of another mesh than its parameter's here"
            raise MismatchError(
                f"{name} cannot be divided for this layout: {why}, and its shape {leaf.shape} is not its "
                "parameter's. Nothing was loaded. Start with the mesh that made the step.",
                differences=((name, f"DTensor {leaf.shape}", "another mesh"),),
            ) from error

    def _sharded(self, ref: LeafRef, tensor: StepTensor, shape: Index, like: Tensor) -> dict[str, object]:
        if ref.about.get("parts") == _DTENSOR:
            # Its own placements are those of another mesh where its shape is its parameter's.
            same = shape == tuple(like.shape)
            return {**ref.about, "class": kind_of(like)} | ({"context": None} if same else {})
        stride = tensor.leaf.stride if tensor.leaf.shape == shape else None
        about = {
            "class": kind_of(like),
            "parts": list(_DTENSOR),
            "context": None,
            "shape": shape,
            "stride": stride or _row_major(shape),
        }
        return {**{key: ref.about[key] for key in ("device",) if key in ref.about}, **about}

    # ---- gradients

    def _gradients(self) -> dict[str, Any]:
        names, kinds, exceptions = [], "", {}
        for full, parameter in self._parameters():
            rank = self._holder.get(full, self._ranks.source)
            saved = self.source if full in self.source.gradients else self.saved(rank)
            if full in saved.flat:
                saved = self._with_elements(full, saved)
            kind, exception = saved.gradients.get(full, ("-", None))
            names.append(full)
            kinds += kind
            place = f"{NAMESPACE}.{full}"
            if kind in _SPARSE:
                self._own(f"{place}.indices", saved.rank)
                self._own(f"{place}.values", saved.rank)
            elif kind == "L":
                ref = exception if isinstance(exception, LeafRef) else LeafRef("")
                exception = self._gradient(ref, place, saved, parameter)
            if exception is not None:
                exceptions[full] = exception
        return {"names": names, "kinds": kinds, "exceptions": exceptions}

    def _with_elements(self, full: str, saved: SavedRank) -> SavedRank:
        """A rank that has something of a parameter: one that has nothing of FSDP1's has no gradient of it."""
        tensor = self._ranks.leaves.get(full)
        while tensor is not None:
            having = [rank for rank, box in tensor.boxes() if box.num_elements]
            if saved.rank in having or not tensor.num_elements:
                return saved
            if having:
                return self.saved(having[0])
            if self._ranks.is_complete:
                return saved
            self._ranks.read(range(self._ranks.record.world))
        return saved

    def _gradient(self, ref: LeafRef, place: str, saved: SavedRank, parameter: Tensor) -> LeafRef | None:
        tensor = self._ranks.leaves.get(self._primary(place, saved.rank))
        if tensor is None:
            return ref if ref.about else None
        made = self._made(ref, tensor, place, place.removeprefix(f"{NAMESPACE}."), parameter)
        return LeafRef(place, made.about) if made.about else None

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        seen: set[int] = set()
        for entry in self._tree.entries.values():
            for name, parameter in entry.parameters:
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter


def _whole_shape(live: LiveLeaf) -> Index:
    return live.box.shape if live.box is not None else tuple(local(live.tensor).shape)


def _ties(there: Sequence[tuple[str, StepTensor]]) -> dict[StepTensor, list[str]]:
    """Names that one stored tensor has, under the first of them."""
    stored: dict[tuple[int, str], StepTensor] = {}
    found: dict[StepTensor, list[str]] = {}
    for name, tensor in there:
        # Of what is of no elements none is tied to another.
        rank = next((rank for rank, box in tensor.boxes() if box.num_elements), tensor.ranks[0])
        first = stored.setdefault((rank, tensor.leaf_of(rank).name), tensor)
        found.setdefault(first, []).append(name)
    return found


def _replaced(value: Any, name: str, made: Any) -> Any:
    """A nested value with other references."""
    if type(value) is LeafRef:
        return made(name, value)
    if type(value) in CONTAINERS:
        return rebuild(
            value, [(key, _replaced(item, join(name, key), made)) for key, item in children(value)]
        )
    return value


def _extra_references(value: Mapping[str, Any]) -> Iterator[tuple[str, LeafRef]]:
    for path, state in value.get("extra", {}).items():
        yield from references(state, join(path, "_extra_state"))


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    stride, found = 1, []
    for size in reversed(shape):
        found.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(found))


def _some(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
