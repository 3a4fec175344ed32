"""Taps: what a trainer iterates over in the place of its loader, so that each draw is recorded.

A tap draws no batch before its first `next`, may be iterated again, and need not be exhausted. It passes for
the loader: attributes and `isinstance` are the loader's. Owns no position: that is the run's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from flashckpt.errors import BoundaryError


class Draws(Protocol):
    """What a tap asks of its run."""

    def open(self, tap: Tap) -> None:
        """Begin a pass over the tap's loader, where the run stands."""

    def next(self, tap: Tap) -> Any:
        """The next batch. Raises StopIteration."""

    def resumes(self, name: str) -> bool:
        """Whether the next pass of the tap begins within an epoch that was saved."""

    def make_iterator(self, name: str) -> None:
        """Make the loader's iterator of the open pass, which may draw random numbers."""

    def drawn(self, name: str) -> int: ...

    def passes(self, name: str) -> int: ...


class Tap:
    """In the place of `loader`. name: under which a resume finds its position. on_first: called right before
    the first draw of each pass. opens: the loader's iterator is made with that of the tap, where no resume
    continues: of several loaders, each draws its seed before the first gives a batch.

    drawn: batches given in this epoch; where the tap has not drawn since a resume, those that were trained
    on. passes: those over the loader that have come to their end in this epoch.
    """

    def __init__(
        self, draws: Draws, loader: Any, name: str, on_first: Callable[[], object] | None, opens: bool
    ) -> None:
        own = {"_draws": draws, "_loader": loader, "_name": name, "_on_first": on_first, "_newest": None}
        self.__dict__.update(own, _opens=opens)

    @property
    def drawn(self) -> int:
        draws: Draws = self.__dict__["_draws"]
        return draws.drawn(self.__dict__["_name"])

    @property
    def passes(self) -> int:
        draws: Draws = self.__dict__["_draws"]
        return draws.passes(self.__dict__["_name"])

    @property  # type: ignore[misc]  # typeshed has an attribute that can be set
    def __class__(self) -> Any:
        return self.__dict__["_loader"].__class__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_loader"], name, value)

    def __len__(self) -> int:
        return len(self.__dict__["_loader"])

    def __iter__(self) -> Iterator[Any]:
        inside = self.__dict__
        newest = inside["_newest"] = _Pass(self)
        if inside["_opens"] and not inside["_draws"].resumes(inside["_name"]):
            newest.begin()
            inside["_draws"].make_iterator(inside["_name"])
        return newest


class _Pass(Iterator[Any]):
    """One pass of a tap over its loader."""

    def __init__(self, tap: Tap) -> None:
        self._tap = tap
        self._begun = self._ended = False

    def __next__(self) -> Any:
        inside = self._tap.__dict__
        if self._ended:
            raise StopIteration
        if inside["_newest"] is not self:
            raise BoundaryError(
                f"An older iterator of the loader {inside['_name']!r} was asked for a batch after a newer "
                "one was made. Nothing was captured, and the newer one stands where it was. Draw from one "
                "iterator of a loader at a time."
            )
        if not self._begun:
            self.begin()
        draws: Draws = inside["_draws"]
        try:
            return draws.next(self._tap)
        except StopIteration:
            self._ended = True
            raise

    def begin(self) -> None:
        inside = self._tap.__dict__
        self._begun = True
        if inside["_on_first"] is not None:
            inside["_on_first"]()
        inside["_draws"].open(self._tap)


def inside(tap: Tap) -> tuple[str, Iterable[Any]]:
    """The name and the loader of a tap."""
    return tap.__dict__["_name"], tap.__dict__["_loader"]


def is_tap(value: object) -> bool:
    """`isinstance` would ask the loader."""
    return type(value) is Tap
