"""A loader's position as it is saved: plain values with a fixed set of keys, checked when they come back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flashckpt.errors import DamagedError, MismatchError

_EXPLAINED = {
    "dataloader": "a torch DataLoader",
    "asked": "a loader that keeps its own state",
    "replayed": "an iterable that is replayed",
}


@dataclass(frozen=True)
class Position:
    """Where a loader stands at a boundary.

    kind: which kind of source saved it. epoch: None before the first. batches_taken: of this epoch.
    over: the epoch has no more batches. length: batches of an epoch, None where unknown.
    made_of: batch size and the like, which must not change.
    start: random numbers at the epoch's start, None where nothing was drawn yet or nothing will be redrawn.
    now: random numbers at the boundary. parts: what this kind of source needs beside that.
    """

    kind: str
    epoch: int | None
    batches_taken: int
    over: bool
    length: int | None
    made_of: dict[str, Any]
    start: dict[str, Any] | None
    now: dict[str, Any]
    parts: dict[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def read(cls, saved: Mapping[str, Any], kind: str) -> Position:
        """Raises MismatchError for a position of another kind of source, DamagedError for a malformed one."""
        saved_kind = saved.get("kind")
        if saved_kind in _EXPLAINED and saved_kind != kind:
            raise MismatchError(
                f"The checkpoint was taken with {_EXPLAINED[saved_kind]}, and the loop now has "
                f"{_EXPLAINED[kind]}. The model and the rest of the state were put back already; no "
                "batch was drawn. Start again with the kind of loader that was saved.",
                differences=(("loader", saved_kind, kind),),
            )
        problem = _problem(saved)
        if saved_kind != kind or problem:
            raise DamagedError(
                f"The loader's position in the checkpoint cannot be read ({problem or 'unknown kind'}). "
                "No batch was drawn. Resume from an older step."
            )
        return cls(**saved)


def _problem(saved: Mapping[str, Any]) -> str:
    wanted: dict[str, type | tuple[type, ...]] = {
        "kind": str,
        "epoch": (int, type(None)),
        "batches_taken": int,
        "over": bool,
        "length": (int, type(None)),
        "made_of": dict,
        "start": (dict, type(None)),
        "now": dict,
        "parts": dict,
    }
    if saved.keys() != wanted.keys():
        return f"its keys are {sorted(map(str, saved))}"
    for name, kinds in wanted.items():
        if not isinstance(saved[name], kinds):
            return f"{name} is a {type(saved[name]).__name__}"
    if saved["batches_taken"] < 0:
        return f"batches_taken is {saved['batches_taken']}"
    marks = [saved["now"]] if saved["start"] is None else [saved["now"], saved["start"]]
    if any(mark.keys() != {"global", "own"} for mark in marks):
        return "random numbers are missing"
    return ""
