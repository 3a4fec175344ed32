"""Writes a new run whose only step is an imported checkpoint.

Owns the mapping that a user gives, the names of leaves, and the order: read and map the source, write shard,
part and manifest, and the first version of the catalogue last. Training and every command refuse snapshots
without a catalogue, so a killed import leaves neither a checkpoint nor a place for a fresh run. Reads one
tensor at a time.
"""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from flashckpt import crashpoints
from flashckpt.checkpointer.progress import ANY_LOOP, Progress
from flashckpt.commit.commit_step import found_run, publish_part
from flashckpt.commit.view import check_place, check_writable, has_run
from flashckpt.commit.written import write_image
from flashckpt.errors import FlashckptError, OptionError, RunError, UnusableRunError
from flashckpt.format.catalogue import CATALOGUE, Folder
from flashckpt.format.checked_json import strict_loads
from flashckpt.format.layout import Layout, Leaf
from flashckpt.format.manifest import shard_name
from flashckpt.format.names import DATA, MAX_STEP, AttemptName, SnapshotId
from flashckpt.format.records import MAX_VALUES_BYTES, Part, RankRecord
from flashckpt.format.typed import LeafRef, children, encode_json, too_large
from flashckpt.importing.source import (
    Source,
    SourceTensor,
    Unreadable,
    damaged,
    lookup,
    open_source,
    readable,
)
from flashckpt.restore.filling import MARK
from flashckpt.restore.step_reading import host_bytes
from flashckpt.state import rng
from flashckpt.state.tensors import DTYPE_NAMES, bits
from flashckpt.state.tree import NAMESPACE
from flashckpt.state.values import CONTAINERS, join, rebuild
from flashckpt.store import open_store
from flashckpt.store.base import Store

OnProgress = Callable[[int, int], None]

_SHOWN = 20
_EXTRA = "_extra_state"
_FLAT = "model"
RNG = ("torch", "python", "numpy", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The result of an import. `parts`: name, number of tensors and bytes of each. `skipped`: unreadable
    items with the reason. `left_out`: keys of the source that were not used."""

    source: str
    format: str
    run: str
    step: int
    attempt: AttemptName
    parts: tuple[tuple[str, int, int], ...]
    skipped: tuple[str, ...]
    left_out: tuple[str, ...]


def import_checkpoint(
    path: str | os.PathLike[str],
    run: str | os.PathLike[str],
    mapped: Mapped | None = None,
    *,
    progress: OnProgress = lambda done, total: None,
) -> Imported:
    """Write the checkpoint in `path` as the first step of a new run.

    Raises OptionError (an unknown source, a missing key, an unreadable item), DamagedError (a damaged or
    hostile source), RunError (the place of the run is not free), OSError. After an error no run exists.
    """
    store = open_store(run)
    check_writable(store)
    _check_free(store)
    content = _content_of(open_source(path), mapped or Mapped(), store.url)
    _write(store, content, progress)
    return content.done


def _check_free(store: Store) -> None:
    if has_run(store):
        raise RunError(
            f"{store.url} is a run already. Nothing was written. Import into another folder.", path=store.url
        )
    if store.list(DATA):
        raise RunError(
            f"{store.url} has snapshots but no {CATALOGUE}/: an import into it was interrupted or still "
            "runs. Nothing was written. Remove the folder if no import runs, or import into another one.",
            path=store.url,
        )


def _write(store: Store, content: _Content, progress: OnProgress) -> None:
    check_place(store)
    _check_free(store)
    attempt = content.done.attempt
    folder = Folder(attempt, SnapshotId(attempt, 0))
    try:
        rank = _write_shard(store, folder, content, progress)
        part = Part(id=folder.id, step=content.done.step, world=1, node=0, ranks=(rank,))
        crashpoints.point("import.written")
        publish_part(store, folder, part, secrets.token_hex(6))
        found_run(store, folder, secrets.token_hex(8))
    except UnusableRunError as error:
        _give_up(store, folder)
        raise RunError(
            f"Another process made {store.url} a run during this import. The imported step was removed. "
            "Import into another folder.",
            path=store.url,
        ) from error
    except BaseException:
        if not has_run(store):  # else the last write may have made the run
            _give_up(store, folder)
        raise


def _give_up(store: Store, folder: Folder) -> None:
    """Remove the files of a failed import, and its folders."""
    with suppress(OSError, FlashckptError):
        store.remove_files([f"{folder.path}/{each.name}" for each in store.list(folder.path)])
        for path in (folder.path, f"{DATA}/{folder.writer}", DATA):
            store.remove(path)


def _write_shard(store: Store, folder: Folder, content: _Content, progress: OnProgress) -> RankRecord:
    tensors = {leaf.name: tensor for leaf, tensor in content.leaves}
    layout = Layout.of(leaf for leaf, _ in content.leaves)

    def leaves() -> Iterator[memoryview]:
        """Yield the bytes of each tensor, with one in memory at a time."""
        for leaf in layout.leaves:
            tensor = tensors[leaf.name].read()
            if tuple(tensor.shape) != leaf.shape or DTYPE_NAMES.get(tensor.dtype) != leaf.dtype:
                raise damaged(content.done.source, f"{leaf.name} changed while it was read")
            held = bits(tensor).contiguous()
            yield host_bytes(held)

    name = shard_name(0, secrets.token_hex(6))
    written = write_image(store, f"{folder.path}/{name}", layout, leaves(), progress)
    values = strict_loads(encode_json(content.values), what="values")
    return RankRecord(rank=0, shard=written, values=values)


# The mapping of a source


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """The mapping of a source. `state`: names in the state -> keys of the source, in the forms of `lookup`.
    If empty, each key of the source is taken; a source of tensors only becomes `model`. `step` and `epoch`: a
    number or a key. `rng`: names in `RNG` -> keys of generator states."""

    state: Mapping[str, str] = field(default_factory=dict)
    step: str = "0"
    epoch: str = "0"
    rng: Mapping[str, str] = field(default_factory=dict)
    skip_unreadable: bool = False


@dataclass(frozen=True, slots=True)
class _Content:
    """The content of the imported step: leaves with their tensors, and the values of its rank. `done`: the
    result once it is written."""

    leaves: Sequence[tuple[Leaf, SourceTensor]]
    values: dict[str, Any]
    done: Imported


def _content_of(source: Source, mapped: Mapped, run: str) -> _Content:
    """Apply the mapping. Raises OptionError for keys that the source does not have, and, with their paths,
    for unreadable items unless `skip_unreadable`."""
    chosen = _chosen(source, mapped)
    step, epoch = (_count(source, what, getattr(mapped, what)) for what in ("step", "epoch"))
    generators = {name: _generator(source, name, key) for name, key in mapped.rng.items()}
    unreadable = list[str]()
    parts = {name: readable(part, name, unreadable) for name, part in chosen.items()}
    if unreadable and not mapped.skip_unreadable:
        more = f"\n  … and {len(unreadable) - _SHOWN} more" if len(unreadable) > _SHOWN else ""
        listed = "\n".join(f"  {line}" for line in unreadable[:_SHOWN])
        raise OptionError(
            f"{source.path}: {len(unreadable)} items cannot be imported:\n{listed}{more}\nNothing was "
            "written. Name the parts to take with --state NAME=KEY, or give --skip-unreadable to import all "
            "others."
        )
    collector = _LeafCollector()
    entries = {
        name: collector.entry(name, part) for name, part in parts.items() if type(part) is not Unreadable
    }
    if not collector.leaves:
        raise OptionError(
            f"{source.path}: the chosen parts have no tensor. Nothing was written. Choose others with "
            "--state NAME=KEY."
        )
    # At the start of an epoch: the position of another library's loader is unknown.
    progress = Progress(ANY_LOOP)
    progress.step, progress.epoch = step, epoch
    values = {
        MARK: {"format": source.kind},
        "state": {"entries": entries, NAMESPACE: {"names": [], "kinds": "", "exceptions": {}}},
        "progress": progress.value(),
        "rng": generators,
    }
    if (num_bytes := len(encode_json(values))) > MAX_VALUES_BYTES:
        raise too_large(parts, num_bytes, MAX_VALUES_BYTES)
    done = Imported(
        source=source.path,
        format=source.kind,
        run=run,
        step=step,
        attempt=AttemptName(1, secrets.token_hex(4)),
        parts=tuple(_summary(name, collector.leaves) for name in entries),
        skipped=tuple(unreadable),
        left_out=tuple(_left_out(source, mapped)),
    )
    return _Content(collector.leaves, values, done)


def _chosen(source: Source, mapped: Mapped) -> dict[str, Any]:
    if not mapped.state:
        if all(type(each) is SourceTensor for each in source.tree.values()):
            return {_FLAT: source.tree}
        for key in source.tree:
            _check_name(str(key))
        return {str(key): value for key, value in source.tree.items()}
    found: dict[str, Any] = {}
    for name, key in mapped.state.items():
        _check_name(name)
        part, _, inner = name.partition(".")
        if part in mapped.state and inner:
            raise OptionError(
                f"--state {name}: {part} is already taken as a whole. Nothing was written. Give only one of "
                "the two."
            )
        value = _looked_up(source, key)
        if inner:
            found.setdefault(part, {})[inner] = value
        else:
            found[part] = value
    return found


def _check_name(name: str) -> None:
    if not name or name.startswith(("!", "_", ".")) or name.split(".")[0] == NAMESPACE:
        raise OptionError(
            f"{name!r} cannot be the name of a part of the state. Nothing was written. Give the parts other "
            "names: --state NAME=KEY."
        )


def _looked_up(source: Source, key: str) -> Any:
    try:
        return lookup(source.tree, key)
    except KeyError:
        names = ", ".join(str(each) for each in list(source.tree)[:_SHOWN])
        raise OptionError(f"{source.path} has no {key!r}. Nothing was written. It has: {names}.") from None


def _count(source: Source, what: str, text: str) -> int:
    """Read a step or epoch, given as a number or as a key of the source."""
    found: Any = int(text) if text.isascii() and text.isdigit() else _looked_up(source, text)
    if type(found) is SourceTensor and not found.shape:
        found = found.read().item()
    if type(found) is float and found.is_integer():
        found = int(found)
    if type(found) is not int or not 0 <= found <= MAX_STEP:
        raise OptionError(
            f"--{what} {text} is not the number of a {what}. Nothing was written. Give a number, or a key of "
            "the source that has one."
        )
    return found


def _left_out(source: Source, mapped: Mapped) -> list[str]:
    """Keys of the source that the mapping does not use."""
    if not mapped.state or "" in mapped.state.values():
        return []
    keys = [*mapped.state.values(), mapped.step, mapped.epoch, *mapped.rng.values()]
    return [
        str(each)
        for each in source.tree
        if not any(
            key == str(each) or f"{key}.".startswith(f"{each}.") or f"{each}.".startswith(f"{key}.")
            for key in keys
        )
    ]


def _summary(name: str, leaves: Sequence[tuple[Leaf, SourceTensor]]) -> tuple[str, int, int]:
    """Name of a part, number of its tensors, and their bytes."""
    own = [leaf for leaf, _ in leaves if leaf.name == name or leaf.name.startswith(f"{name}.")]
    return name, len(own), sum(leaf.num_bytes for leaf in own)


class _LeafCollector:
    """Collects the leaves of parts."""

    def __init__(self) -> None:
        self.leaves: list[tuple[Leaf, SourceTensor]] = []
        self._names: set[str] = set()

    def entry(self, name: str, part: Any) -> dict[str, Any]:
        """Return the entry of a part. A dictionary of tensors becomes the entry of a module. Every other
        value is kept unchanged until a program attaches an object under this name."""
        if not _is_of_module(part):
            return {"kind": MARK, "state": self._values(part, name)}
        extra = {}
        for key, value in part.items():
            if type(value) is SourceTensor and key.split(".")[-1] != _EXTRA:
                self._leaf(join(name, key), value)
            else:
                path = join(name, key.removesuffix(_EXTRA).rstrip("."))
                extra[path] = self._values(value, join(path, _EXTRA))
        return {"kind": "module", **({"extra": extra} if extra else {})}

    def _values(self, value: Any, name: str) -> Any:
        if type(value) is SourceTensor:
            self._leaf(name, value)
            return LeafRef(name)
        if type(value) in CONTAINERS:
            return rebuild(
                value, [(key, self._values(each, join(name, key))) for key, each in children(value)]
            )
        return value

    def _leaf(self, name: str, tensor: SourceTensor) -> None:
        if name in self._names:
            raise OptionError(
                f"Two tensors of the source would be called {name}. Nothing was written. Import their parts "
                "under other names: --state NAME=KEY."
            )
        self._names.add(name)
        self.leaves.append(
            (Leaf(name=name, dtype=tensor.dtype, shape=tensor.shape, stride=tensor.stride), tensor)
        )


def _is_of_module(part: Any) -> bool:
    if not isinstance(part, dict) or not all(isinstance(key, str) for key in part):
        return False
    tensors = {key for key, value in part.items() if type(value) is SourceTensor}
    return bool(tensors) and all(key in tensors or key.split(".")[-1] == _EXTRA for key in part)


# Random numbers


def _generator(source: Source, name: str, key: str) -> Any:
    """Convert the result of a library's `get_state` to the form of `rng.capture`."""
    value = _looked_up(source, key)
    try:
        if name == "python":
            generator = random.Random()
            generator.setstate(value)
            return rng.capture_one(generator)
        if name == "numpy":
            legacy = np.random.RandomState()
            legacy.set_state(value)
            if not 0 <= legacy.get_state(legacy=False)["state"]["pos"] <= 624:  # NumPy does not check it
                raise ValueError("its position is outside of its key")
            return rng.capture_one(legacy)
        if name == "torch":
            return rng.capture_one(torch.Generator().set_state(value.read()))
        devices = value if isinstance(value, (list, tuple)) else [value]
        return [each.read().numpy().tobytes() for each in devices]
    except (TypeError, LookupError, ValueError, AttributeError, RuntimeError) as error:
        raise OptionError(
            f"--rng {name}={key} is not a state of the {name} generator ({error}). Nothing was written. Name "
            "the key of such a state, or leave the option out."
        ) from error
