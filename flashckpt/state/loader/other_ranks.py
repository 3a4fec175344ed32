"""The saved progress of old ranks, merged for a rank of another layout.

A rank that resumes a run on another number of ranks, or on another mesh, has no values of its own. It gets
those of one old rank, after a comparison with the other ranks: all must be at the same point of the epoch.
The loader's sampler divides the rest of the epoch when the loop begins.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from flashckpt.errors import DamagedError, MismatchError
from flashckpt.format.typed import encode_json
from flashckpt.state import rng
from flashckpt.state.loader.order import drawing_state

_SAME = ("step", "epoch", "has_ended", "iterated", "taps", "to_skip")


def merged_progress(
    values: Mapping[int, Mapping[str, Any]], rank: int, world: int, old_world: int
) -> dict[str, Any]:
    """Return the progress of `rank` in another layout, of `world` ranks.

    values: old rank -> progress: of the rank with this number, or with this number modulo `old_world`, and of
    any other old ranks, which are compared (`goes_by_others`). Raises MismatchError if the old ranks are at
    different points, DamagedError if a progress cannot be read.
    """
    try:
        return _merged_progress(values, rank, world, old_world)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise DamagedError(
            f"The saved progress of the ranks cannot be read ({error!r}). Nothing was loaded. Resume from an "
            "older step."
        ) from error


def goes_by_others(progress: Mapping[str, Any]) -> bool:
    """Whether a merge needs the progress of other ranks, too: for a loader that draws its order or has its
    own state, which may differ among ranks."""
    try:
        positions = [entry["position"] for entry in progress["sources"]]
        return any("state" in each["parts"] or _is_drawn(each["share"]) for each in positions)
    except (KeyError, TypeError, AttributeError):
        return True  # merged_progress raises for it


def merged_rng(values: Mapping[int, Mapping[str, Any]], rank: int, old_world: int) -> dict[str, Any]:
    """Return the global generator states of `rank` in a new layout: those of the old rank with its number. A
    new rank gets each state that all old ranks in `values` share; where they differ, it gets a state derived
    from an old rank's state and its own number."""
    own = dict(values[_source_rank(values, rank, old_world)])
    if rank in values:
        return own
    return {
        name: state
        if all(each.get(name) == state for each in values.values())
        else _derived(name, state, rank)
        for name, state in own.items()
    }


def _source_rank(values: Mapping[int, Any], rank: int, old_world: int) -> int:
    """Return the old rank whose values a new rank gets: the one with its number, or an evenly chosen one."""
    source = rank % old_world
    return source if source in values else sorted(values)[rank % len(values)]


def _merged_progress(
    values: Mapping[int, Mapping[str, Any]], rank: int, world: int, old_world: int
) -> dict[str, Any]:
    source = _source_rank(values, rank, old_world)
    merged: dict[str, Any] = copy.deepcopy(dict(values[source]))
    mine = _facts(merged)
    for other, value in values.items():
        its = _facts(value)
        name = next((each for each in mine if each in its and mine[each] != its[each]), None)
        if name is not None:
            raise MismatchError(
                f"The ranks of the checkpoint are at different points: {name} is {mine[name]} on rank "
                f"{source} and {its[name]} on rank {other}. Another number of ranks cannot resume it; "
                "nothing was loaded. Resume on the former ranks, or from another step.",
                differences=((name, f"rank {source}: {mine[name]}", f"rank {other}: {its[name]}"),),
            )
    for entry in merged["sources"]:
        position = entry["position"]
        found = {
            other: each["position"]
            for other, value in values.items()
            for each in value["sources"]
            if each["name"] == entry["name"]
        }
        if rank not in values:
            for number, states in enumerate((position["now"], *position["ahead"])):
                theirs = {r: [each["now"], *each["ahead"]][number]["global"] for r, each in found.items()}
                states["global"] = merged_rng(theirs, rank, old_world)
        # For a position that moved before and was not resumed since, the first layout counts.
        moved, share = position["moved"] or {"ranks": old_world, "alike": True}, position["share"]
        alike = moved["alike"] and all(_have_same_order(position, each) for each in found.values())
        position["moved"] = {"ranks": moved["ranks"], "world": world, "alike": alike}
        if not alike and share is not None and not share["batches"]:
            share["order"] = None  # each rank had an order of its own
    return merged


def _facts(progress: Mapping[str, Any]) -> dict[str, Any]:
    """Return what all ranks have alike if they are at the same point."""
    found = {name: progress[name] for name in _SAME}
    positions = {entry["name"]: entry["position"] for entry in progress["sources"] if entry["is_open"]}
    found["open"] = [*positions]
    for name, position in positions.items():
        its = {each: position[each] for each in ("epoch", "batches_taken")}
        its |= {"batches drawn ahead": len(position["ahead"]), **(position["share"] or {}), "rank": None}
        found.update({f"{each} of the loader {name}".rstrip(): its[each] for each in its})
    return found


def _have_same_order(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two ranks' loaders drew the same order, or have the same state of their own."""
    if "state" in one["parts"]:
        return encode_json(one["parts"]["state"]) == encode_json(other["parts"].get("state"))
    share = one["share"]
    if not _is_drawn(share) or one["at_draw"] is None or other["at_draw"] is None:
        return True
    states = (drawing_state(share["order"]["drawn_by"], each["at_draw"]) for each in (one, other))
    return bool(next(states) == next(states))


def _is_drawn(share: Any) -> bool:
    """Whether a loader draws its order from random numbers."""
    return share is not None and share["order"] is not None and share["order"]["drawn_by"] is not None


def _derived(name: str, state: Any, rank: int) -> Any:
    """Return a global generator's state, in the form of `rng.capture`, seeded by another rank's state and
    this rank's number."""
    digest = hashlib.blake2b(encode_json([name, state, rank]), digest_size=8).digest()
    seed = int.from_bytes(digest, "little")
    if name == "python":
        return rng.capture_one(random.Random(seed))
    if name == "numpy":
        return rng.capture_one(np.random.RandomState(seed % 2**32))
    if name == "torch":
        return rng.capture_one(torch.Generator().manual_seed(seed))
    # The state of a device: seed and offset, 8 bytes each. Other forms stay unchanged.
    return [digest + bytes(8) if len(each) == 16 else each for each in state]
