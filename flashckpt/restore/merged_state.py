"""A committed step for a live state of another layout: more ranks or fewer, another mesh, one process.

Owns the slices of tensors that a rank takes, and the values. Parameters and their optimizer state go by
name, on whatever ranks they are. Everything else (schedulers, counters, buffers that differ) belongs to a
rank: rank r takes that of rank r modulo the old world size. FSDP1 (deprecated by torch) is refused. Reads no
bytes of tensors, and changes nothing live. Imported only for such a step."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from torch import Tensor

from flashckpt.capture.plan import local
from flashckpt.commit.steps import StepRecord
from flashckpt.errors import DamagedError, MismatchError, StateError
from flashckpt.format.layout import Box, Leaf
from flashckpt.format.typed import Hole, LeafRef, children, decode, encode_json
from flashckpt.restore.filling import MARK, is_imported
from flashckpt.restore.imported import bound
from flashckpt.restore.snapshot import Snapshot
from flashckpt.restore.step_reading import StepReading
from flashckpt.restore.step_tensors import (
    Parts,
    StepRanks,
    StepTensor,
    TensorSlice,
    ties,
)
from flashckpt.state.leaves import LiveLeaf, leaf_names
from flashckpt.state.loader.other_ranks import goes_by_others, merged_progress, merged_rng
from flashckpt.state.modules import ModuleEntry
from flashckpt.state.objects import StateEntry
from flashckpt.state.optimizers import OptimizerEntry
from flashckpt.state.tensors import is_sharded, kind_of
from flashckpt.state.tree import NAMESPACE, PARTIAL, Tree
from flashckpt.state.values import CONTAINERS, join, rebuild, references

log = logging.getLogger(__name__)

_DTENSOR = ["_local_tensor"]
_SPARSE = ("S", "C")


def begin_for_layout(tree: Tree, record: StepRecord, rank: int, world: int) -> StepReading:
    """Merge a step for the live state of `rank` of `world`. Changes nothing, and reads no bytes of tensors.

    Raises MismatchError if the step cannot be merged, or is of FSDP1; DamagedError or OSError if its records
    cannot be read.
    """
    if is_imported(record):
        record = bound(tree, record)
    merged = MergedState(tree, record, rank, world)
    merged.merge()
    leaves = {leaf.name: leaf for leaf, _ in merged.leaves}
    parts = {leaf.name: parts for leaf, parts in merged.leaves}
    log.info(
        "step %d of %d ranks is put together for rank %d of %d: %d leaves, %d bytes",
        record.step, record.world, rank, world, len(leaves), sum(leaf.num_bytes for leaf in leaves.values()),
    )  # fmt: skip
    snapshot = Snapshot(
        step=record.step,
        attempt=record.attempt,
        boundary=record.boundary,
        tier="local",
        leaves=leaves,
        values=merged.values(),
        untaken=merged.untaken(),
        elsewhere=merged.untaken(("module",)),
    )
    files = {piece.path for each in parts.values() for piece, _ in each}
    return StepReading(snapshot, parts, files if world > 1 else ())


class SavedRank:
    """The values of one rank of a step, decoded."""

    def __init__(self, rank: int, values: Mapping[str, Any]) -> None:
        self.rank = rank
        self.values: dict[str, Any] = decode(dict(values))
        self.entries: dict[str, Any] = self.values["state"]["entries"]

    @cached_property
    def gradients(self) -> dict[str, tuple[str, Any]]:
        """Name of a parameter -> the kind of its gradient, and its exception or None."""
        value = self.values["state"][NAMESPACE]
        pairs = zip(value["names"], value["kinds"], strict=True)
        return {name: (kind, value["exceptions"].get(name)) for name, kind in pairs}

    @cached_property
    def states(self) -> dict[tuple[str, str], Any]:
        """Optimizer and full name of a parameter -> its state, with references to its leaves."""
        found: dict[tuple[str, str], Any] = {}
        for name, value in self.entries.items():
            if value["kind"] != "optimizer":
                continue
            order, scalars = [full for group in value["params"] for full in group], iter(value["scalars"])
            for index, number in zip(*value["state"], strict=True):
                found[name, order[index]] = _filled(value["schemas"][number], scalars)
        return found


def _filled(schema: Any, scalars: Iterator[Any]) -> Any:
    """Return the state of one parameter: a schema that many share, with its own values in the holes."""
    if type(schema) is Hole:
        return next(scalars)
    items = [(key, _filled(item, scalars)) for key, item in children(schema)]
    return rebuild(schema, items) if items else schema


class MergedState:
    """The parts of a step that a live state takes: after `merge`, `leaves` and `values`."""

    def __init__(self, tree: Tree, record: StepRecord, rank: int, world: int) -> None:
        self._tree, self._live, self._rank, self._world = tree, tree.found(), rank, world
        self._ranks = StepRanks(record, rank, world)
        self._saved: dict[int, SavedRank] = {}
        self._wanted: list[tuple[Leaf, StepTensor, TensorSlice]] = []
        self._names: set[str] = set()
        self._used: set[str] = set()
        self._owner: dict[str, int] = {}
        self.leaves: list[tuple[Leaf, Parts]] = []
        self._value: dict[str, Any] = {}

    def merge(self) -> None:
        """Raises MismatchError if pieces cannot be merged, DamagedError for malformed values."""
        try:
            self._check_not_flat()
            self._take_live()
            entries = {}
            for name, entry in self._tree.entries.items():
                saved = self._with_entry(name)
                if saved is not None:
                    entries[name] = self._entry(entry, saved)
            if self._world == 1:
                entries = self._other_entries() | entries
            self._value = {"entries": entries, NAMESPACE: self._gradients()}
            if PARTIAL in self.source.values["state"]:
                self._value[PARTIAL] = True
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, StopIteration) as error:
            raise DamagedError(
                f"The values of the step are malformed ({error!r}). It cannot be used; nothing was loaded."
            ) from error
        found = self._ranks.find([(tensor.name, region) for _, tensor, region in self._wanted])
        self.leaves += [(leaf, parts) for (leaf, _, _), parts in zip(self._wanted, found, strict=True)]

    def _check_not_flat(self) -> None:
        """Raise MismatchError if parameters are, or were, in the flat form of FSDP1."""
        flat = {name for value in self.source.entries.values() for name in value.get("flat", ())}
        for entry in self._tree.entries.values():
            flat |= set(entry.flat) if isinstance(entry, ModuleEntry) else set()
        if flat:
            record, name = self._ranks.record, min(flat)
            raise MismatchError(
                f"{name} is a parameter of FSDP1 (FullyShardedDataParallel). A run with FSDP1 resumes only "
                f"with the number of ranks and the wrapping that made the step: {record.world} ranks made "
                f"it, and there are {self._world}. Nothing was loaded. Start with as many ranks and wrap the "
                "model alike; for any number of ranks use FSDP2 (fully_shard).",
                differences=((name, f"{record.world} ranks", f"FSDP1 on {self._world} ranks"),),
            )

    # ---- tensors

    def saved(self, rank: int) -> SavedRank:
        """Return the values of a rank of the step."""
        if rank not in self._saved:
            record = self._ranks[rank]
            self._saved[rank] = SavedRank(rank, record.values)
        return self._saved[rank]

    @cached_property
    def source(self) -> SavedRank:
        """The rank whose own values this one takes."""
        return self.saved(self._ranks.source)

    def _take_live(self) -> None:
        """Take the live parameters and buffers, under their live names."""
        lives = [leaf for leaf in self._live.leaves if leaf.kind in ("parameter", "buffer")]
        names = [[leaf.name, *leaf.aliases] for leaf in lives]
        self._ranks.look_for([name for each in names for name in each])
        for leaf, mine in zip(lives, names, strict=True):
            there = [(name, found) for name in mine if (found := self._ranks.leaves.get(name)) is not None]
            # Tied as they were saved; the comparison reports another tie here.
            for first, group in ties(there).items():
                self._take(leaf, group, first)
        self._take_absent()

    def _take(self, live: LiveLeaf, names: list[str], tensor: StepTensor) -> None:
        if live.kind == "parameter":
            self._check_one(tensor)
        self._owner.update(dict.fromkeys(names, self._nearest(tensor)))
        region = tensor.whole
        if live.box is not None and live.box.shape == tensor.shape:
            region = TensorSlice(live.box.start, tuple(local(live.tensor).shape))
        stride = tensor.leaf.stride if region.shape == tensor.leaf.shape else None
        self._want(names[0], tensor, region, stride, tuple(names[1:]))

    def _check_one(self, tensor: StepTensor) -> None:
        """Raise MismatchError for a parameter that is different on each rank, if the number of ranks has
        changed."""
        if self._world == self._ranks.record.world:
            return
        if not tensor.is_one:
            self._ranks.read(range(self._ranks.record.world))  # any may have different bytes
        if tensor.is_by_rank:
            ranks = tensor.ranks
            shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
            raise MismatchError(
                f"{tensor.name} is whole on ranks {shown} and has different bytes on each: with "
                f"{self._world} ranks where there were {self._ranks.record.world}, nothing says which one "
                "is right. Nothing was loaded. Start with as many ranks as made the step.",
                differences=((tensor.name, "another one on each rank", "one tensor"),),
            )

    def _take_absent(self) -> None:
        """Take leaves of modules that the live state lacks: buffers that are created from the snapshot; in
        one process, which merges all ranks, every leaf."""
        names = {name for leaf in self._live.leaves for name in (leaf.name, *leaf.aliases)}
        ranks = range(self._ranks.record.world) if self._world == 1 else [self._ranks.source]
        for rank in ranks:
            for part, value in self.saved(rank).entries.items():
                if value["kind"] != "module":
                    continue
                extra = {leaf for ref in _extra_references(value) for leaf in leaf_names(*ref)}
                made = {*value.get("transient", ()), *value.get("resized", ())}
                record = self._ranks[rank]
                for _, leaf, _ in (*record.counted(), *record.elsewhere()):
                    name = leaf.name
                    if not name.startswith(f"{part}.") or name in names or name in extra | self._names:
                        continue
                    if self._world == 1 or name in made or self._is_unmade(name):
                        self._take_of_rank(name, rank)

    def _is_unmade(self, name: str) -> bool:
        """Whether a live module declares a buffer of this name and has not created it yet."""
        path, _, key = name.rpartition(".")
        for entry in self._tree.entries.values():
            if isinstance(entry, ModuleEntry) and path in entry.modules:
                return entry.modules[path]._buffers.get(key, self) is None
        return False

    def _take_of_rank(self, name: str, rank: int) -> None:
        """Take a tensor as one rank had it."""
        if name in self._names:
            return
        tensor = self._ranks.leaves.get(name)
        if tensor is None:
            return  # the comparison reports it as missing
        self._used.add(tensor.name)
        piece = tensor.of_rank(rank)
        if piece is None:
            self._want(name, tensor, tensor.whole, tensor.leaf.stride)
            return
        aliases = tuple(each for each in (piece.leaf.name, *piece.leaf.aliases) if each != name)
        self._names.update((name, *aliases))
        leaf = replace(piece.leaf, name=name, aliases=aliases, offset=-1)
        self.leaves.append((leaf, [(piece, piece.region)]))

    def _want(
        self,
        name: str,
        tensor: StepTensor,
        region: TensorSlice,
        stride: tuple[int, ...] | None,
        aliases: tuple[str, ...] = (),
    ) -> None:
        if name in self._names:
            return
        self._used.add(tensor.name)
        self._names.update((name, *aliases))
        box = None if region.shape == tensor.shape else Box(shape=tensor.shape, start=region.start)
        leaf = Leaf(
            name=name, dtype=tensor.dtype, shape=region.shape, stride=stride, aliases=aliases, box=box
        )
        own = tensor.of_rank(self._nearest(tensor)) if tensor.is_by_rank else None
        if own is not None:
            as_it_was = replace(own.leaf, name=name, aliases=aliases, offset=-1)
            self.leaves.append((as_it_was, [(own, own.region)]))
        else:
            self._wanted.append((leaf, tensor, region))

    def _nearest(self, tensor: StepTensor) -> int:
        """Return the rank whose values are taken if it has a slice of the tensor, else another that has."""
        ranks, source = tensor.ranks, self._ranks.source
        return source if source in ranks else ranks[self._rank % len(ranks)]

    def untaken(self, kinds: Collection[str] = ("module", "optimizer")) -> tuple[str, ...]:
        """Return leaves of modules and optimizers, of the known ranks, that have no place here. They may have
        one on another rank: another stage of a pipeline."""

        def names_of(name: str) -> tuple[str, ...]:
            tensor = self._ranks.leaves.get(name)
            return () if tensor is None else (tensor.leaf.name, *tensor.leaf.aliases)

        parts = tuple(f"{name}." for name, value in self.source.entries.items() if value["kind"] in kinds)
        left = [name for name in self._ranks.leaves if name.startswith(parts) and name not in self._used]
        return tuple(sorted(name for name in left if self._used.isdisjoint(names_of(name))))

    # ---- values

    def values(self) -> dict[str, Any]:
        """Return the values of the merged state, as a rank of the step has them."""
        own, old_world, rank = self.source.values, self._ranks.record.world, self._rank
        if rank >= old_world or goes_by_others(own["progress"]):
            self._ranks.read_apart()
        known = {each: self.saved(each).values for each in self._ranks.known}
        progress = {each: values["progress"] for each, values in known.items()}
        if rank >= old_world and MARK not in own:
            log.warning(
                "step %d was made by %d ranks, and rank %d was not among them: its random numbers and its "
                "own values are derived from those of rank %d. They are the same at each such start, and "
                "differ from those of an uninterrupted run",
                self._ranks.record.step, old_world, rank, self._ranks.source,
            )  # fmt: skip
        return {
            **own,
            "state": self._value,
            "progress": merged_progress(progress, rank, self._world, old_world),
            "rng": merged_rng({each: values["rng"] for each, values in known.items()}, rank, old_world),
        }

    def _with_entry(self, name: str) -> SavedRank | None:
        """Return the rank whose entry of this name is taken."""
        if name in self.source.entries:
            return self.source
        return next((s for r in self._ranks.known if name in (s := self.saved(r)).entries), None)

    def _other_entries(self) -> dict[str, Any]:
        """Return the entries that only the step has."""
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
        self._take_references(found, saved.rank)
        self._warn_of_differences(entry.name, found)
        return dict(value)

    def _take_references(self, refs: Iterable[tuple[str, LeafRef]], rank: int) -> None:
        for place, ref in refs:
            for leaf in leaf_names(place, ref):
                self._take_of_rank(self._stored_name(leaf, rank), rank)

    def _stored_name(self, name: str, rank: int) -> str:
        """Return the first name of the leaf that a rank stored under this name or alias."""
        tensor = self._ranks.leaves.get(name)
        return tensor.leaf_of(rank).name if tensor is not None and rank in tensor.ranks else name

    def _warn_of_differences(self, name: str, refs: Iterable[tuple[str, LeafRef]]) -> None:
        known = [rank for rank in self._ranks.known if name in self.saved(rank).entries]
        differs = len({encode_json(self.saved(rank).entries[name]) for rank in known}) > 1
        for leaf in (leaf for place, ref in refs for leaf in leaf_names(place, ref)):
            tensor = self._ranks.leaves.get(leaf)
            differs = differs or (tensor is not None and tensor.is_by_rank)
        if differs and self._world != self._ranks.record.world:
            log.warning(
                "%s differs from rank to rank in step %d: rank %d of %d continues with that of rank %d of %d",
                name, self._ranks.record.step, self._rank, self._world, self._ranks.source,
                self._ranks.record.world,
            )  # fmt: skip

    def _module(self, entry: ModuleEntry, value: dict[str, Any]) -> dict[str, Any]:
        """Merge lists of names of all known ranks; extra state belongs to a rank."""
        values = [self.saved(r).entries.get(entry.name, {}) for r in self._ranks.known]
        merged = {**value, "frozen": _all_of("frozen", values)}
        for key in ("transient", "resized"):
            if names := _all_of(key, values):
                merged[key] = names
        extra: dict[str, Any] = {}
        here = {path for path, _ in entry.extras}
        for rank in (self._ranks.source, *self._ranks.known):
            own = self.saved(rank).entries.get(entry.name, {}).get("extra", {})
            for path, state in own.items():
                if path not in extra and (path in here or self._world == 1):
                    extra[path] = state
                    self._take_references(references(state, join(path, "_extra_state")), rank)
        merged.pop("extra", None)
        return {**merged, "extra": extra} if extra else merged

    def _optimizer(self, entry: OptimizerEntry, value: dict[str, Any], saved: SavedRank) -> dict[str, Any]:
        name = entry.name
        groups = self._groups_of(name, len(value["params"]))
        live = [[full for full, _, _ in group] for group in entry.places()]
        # One process merges all ranks: it keeps the parameters that it lacks, for the comparison.
        merged = [
            [full for full in mine if full in there]
            + [full for full in there if self._world == 1 and full not in mine]
            for mine, there in zip(live, groups, strict=False)
        ]
        for number, options in enumerate(value["groups"]):
            self._take_references(references(options, f"{name}.groups.{number}"), saved.rank)
        self._take_references(references(value["shared"], f"{name}.shared"), saved.rank)
        params = merged + [list(each) for each in groups[len(live) :]]
        return {**value, "params": params, **self._states(entry)}

    def _groups_of(self, name: str, count: int) -> list[dict[str, None]]:
        """Return the parameters of each group, of all known ranks."""
        groups: list[dict[str, None]] = [{} for _ in range(count)]
        for rank in self._ranks.known:
            value = self.saved(rank).entries.get(name)
            if value is not None and value["kind"] == "optimizer":
                for group, names in zip(groups, value["params"], strict=False):
                    group.update(dict.fromkeys(names))
        return groups

    def _states(self, entry: OptimizerEntry) -> dict[str, Any]:
        """Return the state by parameter, in the form that `OptimizerEntry` writes."""
        indexes, states = list[int](), list[Any]()
        places = [place for group in entry.places() for place in group]
        for index, (full, prefix, parameter) in enumerate(places):
            saved = self.saved(self._owner[full]) if full in self._owner else None
            if saved is not None and (entry.name, full) in saved.states:
                state = saved.states[entry.name, full]
                indexes.append(index)
                states.append(_replaced(state, prefix, partial(self._made, parameter, saved.rank)))
        return {"schemas": states, "state": [indexes, list(range(len(states)))], "scalars": []}

    def _made(self, parameter: Tensor, rank: int, place: str, ref: LeafRef) -> LeafRef:
        """Return a reference of a parameter's state to tensors as they are created here; takes its leaves."""
        leaves = leaf_names(place, ref)
        tensor = self._ranks.leaves.get(leaves[0]) if len(leaves) == 1 else None
        if tensor is not None:
            return self._take_like(ref, tensor, leaves[0], parameter)
        for leaf in leaves:
            self._take_of_rank(leaf, rank)
        return LeafRef("", ref.about)

    def _take_like(self, ref: LeafRef, tensor: StepTensor, name: str, like: Tensor) -> LeafRef:
        """Take one tensor that belongs to the parameter `like`: as a DTensor if the parameter is one and the
        tensor has its shape or was one, else as a plain tensor."""
        self._check_one(tensor)
        was_sharded, stored, shape = ref.about.get("parts") == _DTENSOR, tensor.leaf, tensor.shape
        if is_sharded(like) and (was_sharded or shape == tuple(like.shape)):
            about = self._sharded(ref, tensor, like)
            to_make = self._to_make(about, replace(stored, name=name, shape=shape, box=None), like, name)
            start = to_make.box.start if to_make.box is not None else tensor.whole.start
            stride = stored.stride if to_make.shape == stored.shape else None
            self._want(name, tensor, TensorSlice(start, to_make.shape), stride)
            return LeafRef("", about)
        self._want(name, tensor, tensor.whole, stored.stride if stored.box is None else None)
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

    def _sharded(self, ref: LeafRef, tensor: StepTensor, like: Tensor) -> dict[str, object]:
        shape = tensor.shape
        if ref.about.get("parts") == _DTENSOR:
            # With its parameter's shape it takes the live placements: its own are of another mesh.
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
            rank = self._owner.get(full, self._ranks.source)
            saved = self.source if full in self.source.gradients else self.saved(rank)
            kind, exception = saved.gradients.get(full, ("-", None))
            names.append(full)
            kinds += kind
            place = f"{NAMESPACE}.{full}"
            if kind in _SPARSE:
                self._take_of_rank(f"{place}.indices", saved.rank)
                self._take_of_rank(f"{place}.values", saved.rank)
            elif kind == "L":
                ref = exception if isinstance(exception, LeafRef) else LeafRef("")
                exception = self._gradient(ref, place, saved, parameter)
            if exception is not None:
                exceptions[full] = exception
        return {"names": names, "kinds": kinds, "exceptions": exceptions}

    def _gradient(self, ref: LeafRef, place: str, saved: SavedRank, parameter: Tensor) -> LeafRef | None:
        tensor = self._ranks.leaves.get(self._stored_name(place, saved.rank))
        if tensor is None:
            return ref if ref.about else None
        made = self._take_like(ref, tensor, place, parameter)
        return LeafRef(place, made.about) if made.about else None

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        seen: set[int] = set()
        for entry in self._tree.entries.values():
            for name, parameter in entry.parameters:
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter


def _replaced(value: Any, name: str, made: Any) -> Any:
    """Return a nested value with other references."""
    if type(value) is LeafRef:
        return made(name, value)
    if type(value) in CONTAINERS:
        return rebuild(
            value, [(key, _replaced(item, join(name, key), made)) for key, item in children(value)]
        )
    return value


def _all_of(key: str, values: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted({name for value in values for name in value.get(key, ())})


def _extra_references(value: Mapping[str, Any]) -> Iterator[tuple[str, LeafRef]]:
    for path, state in value.get("extra", {}).items():
        yield from references(state, join(path, "_extra_state"))


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(max(size, 1) for size in shape[place + 1 :]) for place in range(len(shape)))
