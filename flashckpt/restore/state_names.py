"""The names of an optimizer's state over all ranks of a step.

A rank leaves the module out of them where one module owns all parameters that its optimizer has; another
rank, or the same state on another layout, may not. So a leaf of such state is known by the full name of its
parameter wherever ranks are put together. Reads records alone, without torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flashckpt.commit.steps import StepRecord
from flashckpt.errors import DamagedError
from flashckpt.format.records import RankRecord
from flashckpt.format.typed import decode

_STATE = "state"


def full_names(record: RankRecord) -> dict[str, str]:
    """Names of leaves in the record of a rank -> what they are known by, of those where that is another name.
    Raises DamagedError where the values do not have the form they were written in."""
    try:
        entries = _entries(record.values)
        renamed: dict[str, str] = {}
        for optimizer, value in entries.items():
            if value.get("kind") == "optimizer":
                short = short_names(optimizer, decode(value["params"]), entries)
                by_short = {name: full for full, name in short.items() if name != full}
                if by_short:
                    renamed |= _of_state(optimizer, by_short, _names(record))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError(
            f"The values of rank {record.rank} do not have the form they were written in ({error!r}). The "
            "step cannot be used; nothing was loaded.",
            rank=record.rank,
        ) from error
    return renamed


def entry_of(record: StepRecord, rank: int, part: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of a rank's state, and the entry that has a part of it ("model.encoder" is in "model"): from
    another rank where this one has no such part, empty where no rank has."""
    ranks = sorted((each.rank for held in record.parts for each in held.ranks), key=lambda r: (r != rank, r))
    for each in ranks:
        value = _state_of(record, each)
        for name, entry in value["entries"].items():
            if f"{part}.".startswith(f"{name}."):
                return value, entry
    return _state_of(record, rank), {}


def _state_of(record: StepRecord, rank: int) -> dict[str, Any]:
    """The decoded values of a rank's state; without entries in a step that was written by hand."""
    state = decode(dict(record.rank(rank).values)).get(_STATE)
    return state if isinstance(state, dict) and "entries" in state else {"entries": {}}


def transient_names(record: StepRecord) -> frozenset[str]:
    """The buffers that no module's state_dict has, of all ranks."""
    ranks = (rank for part in record.parts for rank in part.ranks)
    entries = (entry for rank in ranks for entry in _entries(rank.values).values())
    return frozenset(name for entry in entries for name in entry.get("transient", ()))


def short_names(optimizer: str, groups: Sequence[Sequence[str]], parts: Iterable[str]) -> dict[str, str]:
    """The full names of an optimizer's parameters, by group -> what the leaves of its state call them.
    `parts` are the names of the parts of the state."""
    parts = list(parts)
    owner = {full: _owner(full, parts) for group in groups for full in group}
    owners = {each for each in owner.values() if each not in ("", optimizer)}
    short: dict[str, str] = {}
    for number, group in enumerate(groups):
        for index, full in enumerate(group):
            if owner[full] in ("", optimizer):
                short[full] = f"group{number}[{index}]"
            else:
                short[full] = full if len(owners) > 1 else full[len(owner[full]) + 1 :]
    return short


def state_name(optimizer: str, parameter: str) -> str:
    """What the names of a parameter's state begin with; `parameter` is its full name or its short one."""
    return f"{optimizer}.{_STATE}.{parameter}"


def _of_state(optimizer: str, by_short: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    prefix, renamed = state_name(optimizer, ""), {}
    for name in names:
        if name.startswith(prefix):
            # Behind the parameter's name stands the key of its state; neither says where one ends.
            short = name[len(prefix) :]
            while short and short not in by_short:
                short = short.rpartition(".")[0]
            if short:
                renamed[name] = state_name(optimizer, by_short[short]) + name[len(prefix) + len(short) :]
    return renamed


def _entries(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the state; of a step that was written by hand there may be none."""
    state = values.get(_STATE)
    return dict(state["entries"]) if isinstance(state, dict) and "entries" in state else {}


def _names(record: RankRecord) -> Iterable[str]:
    for _, leaf, _ in (*record.counted(), *record.elsewhere()):
        yield leaf.name
        yield from leaf.aliases


def _owner(full: str, parts: Sequence[str]) -> str:
    """The part of the state that has a parameter: its name begins with that."""
    return next((name for name in parts if full.startswith(f"{name}.")), "")
