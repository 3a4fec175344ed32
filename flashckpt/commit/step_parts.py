"""The parts of a committed step, of which one is in memory at a time. Owns which are kept; opens no file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from flashckpt.format.records import Part, PartHead


class StepParts:
    """In the order of a manifest. Each is read when it is asked for, and kept until another is: those of
    thousands of ranks together take gigabytes. `heads` are those of all."""

    def __init__(self, heads: Sequence[PartHead], read: Callable[[int], Part]) -> None:
        """`read` gives the part of a place in `heads`, and raises where it is not the step's."""
        self.heads, self._read = heads, read
        self._places = {rank.rank: place for place, head in enumerate(heads) for rank in head.ranks}
        self._kept: tuple[int, Part] | None = None

    @classmethod
    def of(cls, parts: Iterable[Part]) -> StepParts:
        """Of parts that are in memory, and stay there."""
        held = tuple(parts)
        return cls([part.head() for part in held], held.__getitem__)

    def __len__(self) -> int:
        return len(self.heads)

    def __iter__(self) -> Iterator[Part]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, place: int) -> Part:
        if self._kept is None or self._kept[0] != place:
            self._kept = None  # or there were two
            self._kept = place, self._read(place)
        return self._kept[1]

    def of_rank(self, rank: int) -> Part | None:
        """The part that holds a rank, None where none does."""
        place = self._places.get(rank)
        return None if place is None else self[place]
