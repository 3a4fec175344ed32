"""A loader that resumes in another process returns the same batches and random numbers as an uninterrupted
run, bit for bit, and loads again only the items of the open round."""

import functools
import tempfile
from functools import partial
from pathlib import Path

import pytest
import runs
from fresh import in_fresh_process

from flashckpt.state.loader.sources import source_of

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:This DataLoader will create")]

FOREVER = 1 << 30
EVERY_CUT = ("2 workers, shuffled", "2 persistent by its own", "3 persistent, one idle")


def epochs_of(name: str) -> int:
    return 3 if "persistent" in name else 2


@functools.cache
def whole(name: str, leave_after: int = FOREVER) -> runs.Record:
    """The uninterrupted run."""
    with tempfile.TemporaryDirectory() as folder:
        runs.seed(3)
        source = source_of(runs.LOADERS[name](f"{folder}/loads"))
        return runs.run(source, range(epochs_of(name)), leave_after=leave_after)


def resumed(
    name: str, folder: str, positions: dict[runs.Key, bytes], leave_after: int
) -> dict[runs.Key, tuple[runs.Record, int]]:
    """Resume from each cut that may make a difference; also return the number of loaded items."""
    results = {}
    for number, (cut, position) in enumerate(positions.items()):
        loads = f"{folder}/{number}"
        first = runs.first_epoch(cut)
        # Persistent workers must also be correct in the next epoch; others are new there.
        last = cut[0] + 1 if "persistent" in name or "main" in name or cut[1] == "end" else first
        epochs = range(first, min(last + 1, epochs_of(name)))
        record = runs.resume(partial(runs.LOADERS[name], loads), position, epochs, leave_after=leave_after)
        results[cut] = record, runs.loads_in(loads)
    return results


def cuts(name: str) -> list[runs.Key]:
    """Return the start of a run, points inside a round and at its end, the last batch, the end of an epoch,
    and later points."""
    last = max(taken for epoch, taken in whole(name).seen if epoch == 0 and isinstance(taken, int))
    end = epochs_of(name) - 1
    few: list[runs.Key] = [(0, 1), (0, last + 1), (0, "after"), (1, 3), (end, last)]
    more: list[runs.Key] = [(0, 0), (0, 2), (0, last), (0, "end"), (1, 0), (1, 1), (end, "end")]
    wanted = few + more if name in EVERY_CUT or "main" in name else few
    return [key for key in dict.fromkeys(wanted) if key in whole(name).positions]


def loads_wanted(record: runs.Record, cut: runs.Key, workers: int, until: int) -> int:
    """Return the items of all batches from the beginning of the cut's round on."""
    epoch, taken = cut
    sizes = {key: size for key, size in record.sizes.items() if epoch <= key[0] <= until}
    first = (epoch + 1, 0)
    if isinstance(taken, int):
        first = epoch, taken - taken % max(1, workers)
    return sum(size for key, size in sizes.items() if key >= first)


@pytest.mark.parametrize("name", runs.LOADERS)
def test_a_resumed_run_equals_an_uninterrupted_run(name: str, tmp_path: Path) -> None:
    record = whole(name)
    positions = {cut: record.positions[cut] for cut in cuts(name)}
    workers = 0 if "main" in name else int(name[0])
    results = in_fresh_process(resumed, name, str(tmp_path), positions, FOREVER)
    for cut, (got, loads) in results.items():
        until = list(got.seen)[-1][0]
        assert got.seen == runs.rest(record, cut, until), cut
        # It saves the same positions; but after an epoch's end it knows that no batch follows, which
        # the whole run did not know at the boundary of this name.
        first = next(iter(got.positions)) if cut[1] == "end" else None
        wrong = [key for key in got.positions if got.positions[key] != record.positions[key] and key != first]
        assert not wrong, cut
        assert loads == loads_wanted(record, cut, workers, until), cut


@pytest.mark.parametrize("name", runs.LOADERS)
def test_a_run_equals_the_bare_loader(name: str, tmp_path: Path) -> None:
    runs.seed(3)
    loader = runs.LOADERS[name](str(tmp_path / "loads"))
    one_is_enough = not any(word in name for word in ("persistent", "main", "distributed"))
    epochs = 1 if one_is_enough else 2
    bare = runs.bare(loader, range(epochs))
    assert bare == {key: value for key, value in whole(name).seen.items() if key[0] < epochs}


@pytest.mark.parametrize("name", ["2 workers, shuffled", "2 persistent by its own", "2 persistent, eager"])
def test_epochs_that_are_left_early(name: str, tmp_path: Path) -> None:
    """Persistent workers have prefetched beyond the point where the loop left."""
    record = whole(name, leave_after=3)
    wanted: list[runs.Key] = [(0, 2), (0, "end"), (0, "after"), (1, 0), (1, 1), (1, "after")]
    positions = {cut: record.positions[cut] for cut in wanted[: 2 * epochs_of(name)]}
    for cut, (got, _) in in_fresh_process(resumed, name, str(tmp_path), positions, 3).items():
        assert got.seen == runs.rest(record, cut, list(got.seen)[-1][0]), cut


def test_workers_started_by_spawn() -> None:
    """The wrappers of the user's functions must be picklable."""
    make = partial(runs.loader, runs.Items("/dev/null"), 1, shuffle=True, worker_init_fn=runs.reseed)
    spawned = partial(make, multiprocessing_context="spawn")
    runs.seed(3)
    record = runs.run(source_of(make()), range(1))
    got = runs.resume(spawned, record.positions[0, 2], range(1))
    assert got.seen == runs.rest(record, (0, 2))
