"""What ranks have saved of their loaders and random numbers, for a rank of another layout to go on from.

A rank that takes up a run on another number of ranks, or on another mesh, has no values of its own. It gets
those of one old rank, after they were compared with the others': where the epoch stands is the same on all of
them. How its loader divides the rest is seen when the loop begins, by its sampler (share.py).
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from flashckpt.errors import DamagedError, MismatchError
from flashckpt.format.typed import encode_json
from flashckpt.state import rng
from flashckpt.state.loader.position import Moved

_SAME = ("step", "epoch", "phase", "open", "iterated", "taps", "to_skip")


def merged_progress(
    values: Mapping[int, Mapping[str, Any]], rank: int, world: int, old_world: int
) -> dict[str, Any]:
    """What `rank` takes up as its progress, in a new layout of `world` ranks, or another one of as many.

    values: `progress` by old rank, of `old_world`: that of the same number, or where there is none, of its
    number modulo the old world, and any others, which are compared (`goes_by_others`). Raises MismatchError
    where ranks stand at different places, DamagedError where one cannot be read.
    """
    try:
        return _merged_progress(values, rank, world, old_world)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise DamagedError(
            f"The progress that the ranks have saved cannot be read ({error!r}). Nothing was loaded. Resume "
            "from an older step."
        ) from error


def goes_by_others(progress: Mapping[str, Any]) -> bool:
    """Whether what is taken up of a rank's progress depends on whether other ranks have the same: of a loader
    that draws its order, or keeps a state of its own."""
    try:
        positions = [entry["position"] for entry in progress["sources"]]
        return any("state" in each["parts"] or _is_drawn(each["made_of"].get("share")) for each in positions)
    except (KeyError, TypeError, AttributeError):
        return True  # what is wrong with it is said where it is taken up


def merged_rng(values: Mapping[int, Mapping[str, Any]], rank: int, old_world: int) -> dict[str, Any]:
    """The global random numbers that `rank` of a new layout takes up: those of the old rank of its number. A
    rank that is new has what all old ones have in common, as far as they are among `values`, and where they
    differ, numbers of its own, derived from an old rank's and its own number."""
    own = dict(values[_model(values, rank, old_world)])
    if rank in values:
        return own
    return {
        name: state
        if all(each.get(name) == state for each in values.values())
        else _derived(name, state, rank)
        for name, state in own.items()
    }


def _model(values: Mapping[int, Any], rank: int, old_world: int) -> int:
    """The old rank whose values a new rank takes up: that of its number, or another, each for as many."""
    source = rank % old_world
    return source if source in values else sorted(values)[rank % len(values)]


def _merged_progress(
    values: Mapping[int, Mapping[str, Any]], rank: int, world: int, old_world: int
) -> dict[str, Any]:
    model = _model(values, rank, old_world)
    merged: dict[str, Any] = copy.deepcopy(dict(values[model]))
    for other, value in values.items():
        _check_same(model, merged, other, value, _SAME)
    for entry in merged["sources"]:
        position = entry["position"]
        entries = {other: _same_source(value, entry) for other, value in values.items()}
        found = {other: each["position"] for other, each in entries.items() if each is not None}
        if set(merged["open"]) & set(entry["phases"]):
            _check_open(model, position, found)
        if rank not in values:
            for number, mark in enumerate((position["now"], *position["ahead"])):
                marks = {r: (each["now"], *each["ahead"])[number] for r, each in found.items()}
                mark["global"] = merged_rng({r: each["global"] for r, each in marks.items()}, rank, old_world)
        made_of = position["made_of"]
        # Of one that was moved before, and not taken up since, the first move counts.
        before = Moved(**made_of["moved"]) if "moved" in made_of else Moved(old_world, world, True)
        alike = before.alike and all(_is_alike(position, each) for each in found.values())
        made_of["moved"] = asdict(Moved(before.ranks, world, alike))
        share = made_of.get("share")
        if not alike and share is not None and not share["batches"]:
            share["order"] = None  # each rank had an order of its own
    return merged


def _same_source(value: Mapping[str, Any], entry: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Another rank's entry of a loader: the one of the same phases."""
    return next((each for each in value["sources"] if each["phases"] == entry["phases"]), None)


def _check_open(model: int, position: Mapping[str, Any], found: Mapping[int, Mapping[str, Any]]) -> None:
    share = position["made_of"].get("share")
    for other, its in found.items():
        _check_same(model, position, other, its, ("epoch", "batches_taken"))
        drawn = ({"batches drawn ahead": len(each["ahead"])} for each in (position, its))
        _check_same(model, next(drawn), other, next(drawn), ("batches drawn ahead",))
        its_share = its["made_of"].get("share")
        if share is not None and its_share is not None:
            _check_same(model, share, other, its_share, tuple(share.keys() - {"rank"}))


def _check_same(
    model: int, mine: Mapping[str, Any], other: int, its: Mapping[str, Any], names: tuple[str, ...]
) -> None:
    for name in names:
        if mine[name] != its[name]:
            raise MismatchError(
                f"The ranks of the checkpoint do not stand at one place: {name} is {mine[name]} on rank "
                f"{model} and {its[name]} on rank {other}. No other number of ranks can go on from there; "
                "nothing was loaded. Resume on the ranks of before, or from another step.",
                differences=((name, f"rank {model}: {mine[name]}", f"rank {other}: {its[name]}"),),
            )


def _is_alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two ranks' loaders gave the same order (of one that is drawn), or keep the same state."""
    if "state" in one["parts"]:
        return encode_json(one["parts"]["state"]) == encode_json(other["parts"].get("state"))
    if not _is_drawn(one["made_of"].get("share")) or one["start"] is None or other["start"] is None:
        return True
    return bool(_drawn_from(one) == _drawn_from(other))


def _drawn_from(position: Mapping[str, Any]) -> Any:
    """The states that decide the order: that of the sampler's own generator, where it has one. The global
    ones are no part of it then, and a program may seed them by rank."""
    sampler, start = position["made_of"]["share"]["order"]["sampler"], position["first"] or position["start"]
    return (start["global"]["torch"], start["own"]) if sampler is None else start["own"][sampler]


def _is_drawn(share: Any) -> bool:
    """Whether a loader draws its order from random numbers."""
    return share is not None and share["order"] is not None and share["order"]["how"] == "drawn"


def _derived(name: str, state: Any, rank: int) -> Any:
    """A global generator's state as `rng.capture` has it, seeded by another one's and a rank's number."""
    marks = hashlib.blake2b(encode_json([name, state, rank]), digest_size=8).digest()
    seed = int.from_bytes(marks, "little")
    if name == "python":
        return rng.capture_one(random.Random(seed))
    if name == "numpy":
        return rng.capture_one(np.random.RandomState(seed % 2**32))
    if name == "torch":
        return rng.capture_one(torch.Generator().manual_seed(seed))
    # Of a device: seed and offset, 8 bytes each; any other form is left as it is.
    return [marks + bytes(8) if len(each) == 16 else each for each in state]
