"""Three epochs of a DataLoader in up to three lives: each begins where the one before was cut. Combines
samplers, workers and cuts, also with an epoch that is left by `break`. The oracle is the run in one life."""

from typing import Any

import numpy as np
import pytest
import runs
import torch
from fresh import in_fresh_process

from flashckpt.state.loader.sources import source_of

EPOCHS, ITEMS, BATCHES, LEFT_AT = 3, 14, 7, 5

Place = tuple[int, int]  # epoch, batches taken; -1: at the epoch's start, before anything is drawn


class Items(runs.Items):
    """With a generator of its own, which each worker copies."""

    def __init__(self) -> None:
        super().__init__("/dev/null", ITEMS)
        self.own = np.random.default_rng(11)

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([*super().__getitem__(index), float(self.own.random())], dtype=torch.float64)


def loader(kind: str, workers: int, persistent: bool) -> Any:
    options: dict[str, Any] = {"batch_size": 2, "persistent_workers": persistent}
    if kind == "eager":
        options.update(batch_size=None, sampler=runs.Eager(BATCHES))
    elif kind == "generator":
        options.update(shuffle=True, generator=runs.owned(9))
    else:
        options.update(shuffle=True)
    return runs.loader(Items(), workers, **options)


KINDS = [
    (kind, workers, persistent)
    for kind in ("shuffle", "eager", "generator")
    for workers, persistent in ((0, False), (2, False), (2, True))
]
CUTS: list[Place] = [(0, 0), (0, 1), (0, 4), (1, -1), (1, 0), (1, 1), (1, 6), (2, -1), (2, 3)]


def live(kind: tuple[str, int, bool], leaves: bool, cut: Place | None, saved: Any) -> tuple[list[Any], Any]:
    """One life: from `saved` (the epoch and the position) to the cut, or to the end of the run. leaves: epoch
    1 is left by `break`."""
    source, seen = source_of(loader(*kind)), []
    runs.seed(1 if saved is None else 99)
    first, position = (0, None) if saved is None else (saved[0], runs.from_wire(saved[1]))
    for epoch in range(first, EPOCHS):
        if cut == (epoch, -1):
            return seen, (epoch, runs.to_wire(source.position()))
        source.begin(epoch, position if epoch == first else None)
        if epoch == first and position is not None and position["epoch"] != epoch:
            runs.rng.restore(position["now"]["global"])
        while True:
            if cut == (epoch, source.batches_taken):
                return seen, (epoch, runs.to_wire(source.position()))
            if leaves and epoch == 1 and source.batches_taken >= LEFT_AT:
                break
            try:
                batch = source.next()
            except StopIteration:
                break
            runs.loop_draws()
            seen.append((epoch, runs.plain(batch), runs.numbers_now()))
    source.close()
    return seen, None


def check(kind: tuple[str, int, bool], leaves: bool) -> list[str]:
    whole, _ = live(kind, leaves, None, None)
    wrong = []
    cuts: list[Place | None] = [cut for cut in CUTS if not leaves or cut != (1, 6)]
    for one, other in [*((cut, None) for cut in cuts), (cuts[2], cuts[3]), (cuts[-3], cuts[-1])]:
        seen, saved = live(kind, leaves, one, None)
        for cut in [other] if other is None else [other, None]:
            more, saved = live(kind, leaves, cut, saved)
            seen += more
        if seen != whole:
            wrong.append(f"{one}, {other}")
    return wrong


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("leaves", [False, True], ids=["whole", "break"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind)))
def test_lives_of_a_loader_equal_one_life(kind: tuple[str, int, bool], leaves: bool) -> None:
    assert in_fresh_process(check, kind, leaves) == []
