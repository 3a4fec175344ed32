"""`load`: a committed step as tensors, verified. Needs no live model. Tensors of one rank are mapped
copy-on-write; those of several ranks are put together in memory."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from typing import Any

import torch

from flashckpt import _native
from flashckpt.commit.lineage import read_whole
from flashckpt.commit.steps import StepRecord
from flashckpt.commit.verification import verify_file
from flashckpt.errors import DamagedError, NoSuchStepError, OptionError
from flashckpt.format.layout import Layout, Leaf
from flashckpt.format.records import Contents
from flashckpt.memory.region import round_up
from flashckpt.restore.snapshot import leaf_view
from flashckpt.restore.step_tensors import entry_of
from flashckpt.restore.whole_tensors import WholeTensors
from flashckpt.state.leaves import Filling, Saved, leaf_names
from flashckpt.state.values import Settling, references
from flashckpt.store.base import Store


def mapped_leaves(store: Store, step: int | None, rank: int) -> dict[str, torch.Tensor]:
    """Return every leaf, whole, by each of its names; that of `rank` if ranks differ. Tied names give the
    same tensor. Writes to a tensor stay in this process.

    Raises NoSuchStepError; DamagedError before anything is returned; MismatchError if the pieces of several
    ranks do not make up a tensor.
    """
    return read_whole(store, step, read=lambda record: _leaves_of(record, rank)[0])


def under(leaves: Mapping[str, torch.Tensor], only: str, step: int | None) -> dict[str, torch.Tensor]:
    """Return the leaves of one part of the state: `model` includes `model.weight`. Raises NoSuchStepError if
    there is none."""
    found = {n: tensor for n, tensor in leaves.items() if n == only or n.startswith(f"{only}.")}
    if not found:
        there = sorted({name.partition(".")[0] for name in leaves})
        raise NoSuchStepError(
            f"The step has no leaf under {only!r}. Nothing was changed. It has: {', '.join(there)}.",
            step=step,
        )
    return found


def views_of_files(record: StepRecord, rank: int) -> dict[str, torch.Tensor] | None:
    """Return the leaves in a rank's own files by name, mapped and not verified; None if a file is not on this
    machine."""
    files = record.files(rank)
    if not all(_is_here(record.store, path, contents.shard.num_bytes) for path, contents in files):
        return None
    views = {
        contents.shard.file: _views(record.store.view(path, contents.shard.num_bytes), contents.layout())
        for path, contents in files
    }
    return {leaf.name: views[file][leaf.name] for file, leaf, _ in record.rank(rank).counted()}


def module_state(store: Store, step: int | None, rank: int, only: str) -> dict[str, Any]:
    """Return the state_dict of the module `only`: its leaves by their names in it, without the buffers that
    its state_dict leaves out, and its extra state.

    Raises OptionError if `only` is neither a module nor a part of one.
    """
    record, (leaves, recorded) = read_whole(
        store, step, read=lambda record: (record, _leaves_of(record, rank))
    )
    value, entry = entry_of(record, rank, only)
    if entry.get("kind") != "module":
        modules = [n for n, each in value["entries"].items() if each["kind"] == "module"]
        raise OptionError(
            f"strip=True with only={only!r}: that is neither a module nor a part of one, and only a module's "
            f"load_state_dict takes leaves as they are. Nothing was changed. Modules of step {record.step}: "
            f"{', '.join(modules) or 'none'}. An optimizer is restored by flashckpt.attach."
        )
    state: dict[str, Any] = under(leaves, only, record.step)
    filling = Filling(Saved(leaves=recorded, value=value, tensor=leaves.__getitem__))
    for path, saved in entry.get("extra", {}).items():
        place = f"{path}._extra_state"
        for left_out in (leaf for where, ref in references(saved, place) for leaf in leaf_names(where, ref)):
            state.pop(left_out, None)
        if f"{path}.".startswith(f"{only}."):
            # Copies, as in a resume: the program's code keeps the objects that it gets.
            state[place] = Settling(filling).settle(saved, None, place)
    filling.make_copies()
    for left_out in entry.get("transient", ()):
        state.pop(left_out, None)
    return {name.removeprefix(f"{only}."): each for name, each in state.items()}


_Leaves = tuple[dict[str, torch.Tensor], dict[str, Leaf]]
"""Tensors by each of their names, and their recorded leaves by the first."""


def _leaves_of(record: StepRecord, rank: int) -> _Leaves:
    if record.world > 1:
        return _whole_leaves(record, rank)
    mapped = {
        contents.shard.file: _mapped(record.store, path, contents, record.step)
        for path, contents in record.files(rank)
    }
    rows = record.rank(rank).counted()
    found = {name: mapped[file][name] for file, leaf, _ in rows for name in (leaf.name, *leaf.aliases)}
    return found, {leaf.name: leaf for _, leaf, _ in rows}


def _whole_leaves(record: StepRecord, rank: int) -> _Leaves:
    whole = WholeTensors(record, rank)
    layout = whole.layout()
    # Forked children inherit this memory, as they do other tensors of a program.
    image = memoryview(mmap.mmap(-1, layout.num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    whole.read(layout, image, torch.get_num_threads())
    found = _views(image, layout)
    return found, {leaf.name: leaf for leaf in layout.leaves}


def _mapped(store: Store, path: str, contents: Contents, step: int) -> dict[str, torch.Tensor]:
    num_bytes, into = contents.shard.num_bytes, None
    if not _is_here(store, path, num_bytes):
        # The verified bytes are used: another request may return different ones.
        into = memoryview(_native.Mapping(round_up(num_bytes)))[:num_bytes]
    status, detail = verify_file(store, path, contents, into)
    if status != "ok":
        raise DamagedError(
            f"{store.url}/{path} is {status}: {detail}. Nothing was loaded. Load an older step: "
            "`flashckpt ls` lists them.",
            step=step,
            path=path,
        )
    return _views(store.view(path, num_bytes) if into is None else into, contents.layout())


def _is_here(store: Store, path: str, num_bytes: int) -> bool:
    """Whether it is a file that can be mapped, or one that is missing or has another length."""
    try:
        descriptor = store.descriptor(path, num_bytes)
    except (DamagedError, OSError):
        return True
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is not None


def _views(image: memoryview, layout: Layout) -> dict[str, torch.Tensor]:
    leaves: dict[str, torch.Tensor] = {}
    for leaf in layout.leaves:
        tensor = leaf_view(image, leaf, layout.data_start + leaf.offset)
        leaves.update(dict.fromkeys((leaf.name, *leaf.aliases), tensor))
    return leaves
