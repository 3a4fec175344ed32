"""`load`: a committed step as tensors, verified, then mapped copy-on-write. Needs no live model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flashckpt.commit.lineage import read_whole
from flashckpt.commit.steps import StepRecord
from flashckpt.commit.verification import verify_file
from flashckpt.errors import DamagedError, NoSuchStepError, OptionError
from flashckpt.format.records import Contents, RankRecord
from flashckpt.format.typed import decode
from flashckpt.restore.snapshot import leaf_view
from flashckpt.state.leaves import Filling, Saved, leaf_names
from flashckpt.state.values import Settling, references
from flashckpt.store.base import Store


def mapped_leaves(store: Store, step: int | None, rank: int) -> dict[str, torch.Tensor]:
    """Every leaf of one rank under each of its names. Tied names give the same tensor. What is written
    to a tensor stays in this process.

    Raises NoSuchStepError; DamagedError before anything is returned.
    """
    return read_whole(store, step, read=lambda record: _leaves_of(record, rank))


def under(leaves: Mapping[str, torch.Tensor], only: str, step: int | None) -> dict[str, torch.Tensor]:
    """The leaves of one part of the state: `model` takes `model.weight`. NoSuchStepError if there is none."""
    found = {n: tensor for n, tensor in leaves.items() if n == only or n.startswith(f"{only}.")}
    if not found:
        there = sorted({name.partition(".")[0] for name in leaves})
        raise NoSuchStepError(
            f"The step has no leaf under {only!r}. Nothing was changed. It has: {', '.join(there)}.",
            step=step,
        )
    return found


def module_state(store: Store, step: int | None, rank: int, only: str) -> dict[str, Any]:
    """What `load_state_dict` of the module `only` takes: its leaves under the names that they have in it,
    without the buffers that its state_dict leaves out, and its extra state.

    OptionError where `only` is no module or no part of one.
    """
    record, leaves = read_whole(store, step, read=lambda record: (record, _leaves_of(record, rank)))
    value = decode(dict(record.rank(rank).values))["state"]
    name = next((n for n in value["entries"] if f"{only}.".startswith(f"{n}.")), "")
    entry = value["entries"].get(name, {})
    if entry.get("kind") != "module":
        modules = [n for n, each in value["entries"].items() if each["kind"] == "module"]
        raise OptionError(
            f"strip=True with only={only!r}: that is no module, or no part of one, and only a module's "
            f"load_state_dict takes leaves as they are. Nothing was changed. Modules of step {record.step}: "
            f"{', '.join(modules) or 'none'}. An optimizer is restored by flashckpt.attach."
        )
    state: dict[str, Any] = under(leaves, only, record.step)
    filling = _filling(record.rank(rank), leaves, value)
    for path, saved in entry.get("extra", {}).items():
        place = f"{path}._extra_state"
        for left_out in (leaf for where, ref in references(saved, place) for leaf in leaf_names(where, ref)):
            state.pop(left_out, None)
        if f"{path}.".startswith(f"{only}."):
            # Copies, as a resume gives them: the program's own code keeps what it is given.
            state[place] = Settling(filling).settle(saved, None, place)
    filling.make_copies()
    for left_out in entry.get("transient", ()):
        state.pop(left_out, None)
    return {name.removeprefix(f"{only}."): each for name, each in state.items()}


def _filling(mine: RankRecord, leaves: dict[str, torch.Tensor], value: dict[str, Any]) -> Filling:
    recorded = {leaf.name: leaf for _, leaf, _ in mine.counted()}
    return Filling(Saved(leaves=recorded, value=value, tensor=leaves.__getitem__))


def _leaves_of(record: StepRecord, rank: int) -> dict[str, torch.Tensor]:
    mapped = {
        contents.shard.file: _mapped(record.store, path, contents, record.step)
        for path, contents in record.files(rank)
    }
    rows = record.rank(rank).counted()
    return {name: mapped[file][name] for file, leaf, _ in rows for name in (leaf.name, *leaf.aliases)}


def _mapped(store: Store, path: str, contents: Contents, step: int) -> dict[str, torch.Tensor]:
    status, detail = verify_file(store, path, contents)
    if status != "ok":
        raise DamagedError(
            f"{store.url}/{path} is {status}: {detail}. Nothing was loaded. Load an older step: "
            "`flashckpt ls` lists them.",
            step=step,
            path=path,
        )
    layout = contents.layout()
    view = store.view(path, layout.num_bytes)
    leaves: dict[str, torch.Tensor] = {}
    for leaf in layout.leaves:
        tensor = leaf_view(view, leaf, layout.data_start + leaf.offset)
        leaves.update(dict.fromkeys((leaf.name, *leaf.aliases), tensor))
    return leaves
