"""`load`: a committed step as new tensors, verified. Needs no live model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flashckpt.commit.lineage import read_whole
from flashckpt.commit.steps import StepRecord
from flashckpt.errors import NoSuchStepError, OptionError
from flashckpt.format.layout import Leaf
from flashckpt.restore.step_reading import read_leaves
from flashckpt.restore.step_tensors import entry_of
from flashckpt.restore.whole_tensors import WholeTensors
from flashckpt.state.leaves import Filling, Saved, leaf_names
from flashckpt.state.values import Settling, references
from flashckpt.store.base import Store


def load_leaves(store: Store, step: int | None, only: str | None) -> dict[str, torch.Tensor]:
    """Return the leaves of one part of the state ("model" includes "model.weight"), or all, whole, by each of
    their names; those of rank 0 if ranks differ. Tied names give the same tensor.

    Raises NoSuchStepError, also if there is no such leaf; DamagedError before anything is returned;
    MismatchError if the pieces of several ranks do not make up a tensor; OutOfSpaceError.
    """

    def read(record: StepRecord) -> dict[str, torch.Tensor]:
        return _under(_leaves_of(record, only)[0], only)

    return read_whole(store, step, read=read)


def _under(leaves: Mapping[str, torch.Tensor], only: str | None) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in leaves.items() if _is_under(name, only)}


def _is_under(name: str, only: str | None) -> bool:
    return only is None or name == only or name.startswith(f"{only}.")


def module_state(store: Store, step: int | None, only: str) -> dict[str, Any]:
    """Return the state_dict of the module `only`: its leaves by their names in it, without the buffers that
    its state_dict leaves out, and its extra state.

    Raises OptionError if `only` is neither a module nor a part of one.
    """

    def read(record: StepRecord) -> tuple[dict[str, Any], dict[str, Any], _Leaves]:
        value, entry = entry_of(record, only)
        if entry.get("kind") != "module":
            modules = [n for n, each in value["entries"].items() if each["kind"] == "module"]
            raise OptionError(
                f"strip=True with only={only!r}: that is neither a module nor a part of one, and only a "
                "module's load_state_dict takes leaves as they are. Nothing was changed. Modules of step "
                f"{record.step}: {', '.join(modules) or 'none'}. flashckpt.attach restores an optimizer."
            )
        return value, entry, _leaves_of(record, only)

    value, entry, (leaves, recorded) = read_whole(store, step, read=read)
    state: dict[str, Any] = _under(leaves, only)
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


def _leaves_of(record: StepRecord, only: str | None) -> _Leaves:
    whole = WholeTensors(record)
    wanted = [
        leaf for leaf in whole.leaves if any(_is_under(name, only) for name in (leaf.name, *leaf.aliases))
    ]
    if only is not None and not wanted:
        there = sorted({leaf.name.partition(".")[0] for leaf in whole.leaves})
        raise NoSuchStepError(
            f"The step has no leaf under {only!r}. Nothing was changed. It has: {', '.join(there)}.",
            step=record.step,
        )
    tensors = read_leaves([(leaf, whole.parts(leaf)) for leaf in wanted], record, torch.get_num_threads())
    found = {name: tensors[leaf.name] for leaf in wanted for name in (leaf.name, *leaf.aliases)}
    return found, {leaf.name: leaf for leaf in wanted}
