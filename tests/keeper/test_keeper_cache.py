"""Snapshots in the cache of a node: on their way home, after deaths, and where it cannot be used."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashckpt import _native
from flashckpt.commit.attempts import mark_ended
from flashckpt.format.names import AttemptName
from flashckpt.memory.cache_folder import CacheFolder, cached_paths, open_cached
from tests.events import ledger
from tests.keeper.driver import (
    begun,
    begun_process,
    committed,
    eventually,
    flip,
    kill_keeper,
    runtime_of,
    saved,
)
from tests.keeper.fake import FakeTrainer, content, keeper_pid, layout_for
from tests.keeper.faulty import faulty_keeper

KIB = 64


@pytest.fixture
def cache() -> Iterator[Path]:
    """A folder on another device than the run."""
    folder = Path(tempfile.mkdtemp(prefix="flashckpt-test-cache-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def attached(run: Path, runtime: Path, cache: Path, **options: Any) -> FakeTrainer:
    return begun(run, runtime, kib=KIB, cache=str(cache), **options)


def files_of(run: Path, runtime: Path, cache: Path) -> list[Path]:
    identity = os.path.basename(runtime_of(run, runtime).path)
    return [Path(each) for each in cached_paths(str(cache), identity)]


def steps_in(run: Path, runtime: Path, cache: Path) -> list[int]:
    """The steps of the cached slots, each of which is whole."""
    found = []
    for path in files_of(run, runtime, cache):
        try:
            slot = open_cached(str(path))
        except FileNotFoundError:
            continue  # removed since the listing
        sealed = slot.sealed()
        assert sealed is not None
        if not slot.header.holds_constants:
            layout = layout_for(KIB)
            for leaf in layout.leaves:
                start = slot.image_offset + layout.data_start + leaf.offset
                assert os.pread(slot.image_descriptor, leaf.num_bytes, start) == content(leaf, sealed.step)
            found.append(sealed.step)
        slot.close()
    return sorted(found)


def wait_cached(trainer: FakeTrainer, *steps: int) -> None:
    def has(status: Any) -> bool:
        return status.cache is not None and {*steps} <= {each.step for each in status.cache.cached}

    trainer.wait_for(has)


def passed_by(run: Path) -> list[str]:
    return [line["message"] for line in ledger(run) if line["event"] == "error" and line["what"] == "cache"]


def reboot(runtime: Path) -> None:
    """Everything in memory is gone."""
    for entry in runtime.rglob("*"):
        if not entry.is_dir():
            entry.unlink(missing_ok=True)


def left_in_the_cache(
    run: Path, runtime: Path, cache: Path, faults: Path, *steps: int, home: bool = True, **options: Any
) -> tuple[AttemptName | None, dict[int, Path]]:
    """An attempt that died, and that has steps in the cache alone. Its name, and the file of each step."""
    found = dict[int, Path]()
    with faulty_keeper(run, runtime, faults):
        (faults / "write.pause").touch()
        job = begun_process(run, runtime, kib=KIB, cache=str(cache), **options)
        for step in steps:
            job.do("snapshot", step, True, home)
            eventually(lambda step=step: step in steps_in(run, runtime, cache))
            new = set(files_of(run, runtime, cache)) - {*found.values()}
            [found[step]] = [path for path in new if "constants" not in path.name]
        job.kill()
    reboot(runtime)
    return AttemptName.parse(job.attempt), found


def cached_steps(trainer: FakeTrainer) -> list[int]:
    """Of what survived in the cache."""
    slots = [grant.open() for grant in trainer.client.surviving() if grant.kind == "cache"]
    found = [each.sealed() for each in slots if not each.header.holds_constants]
    for slot in slots:
        slot.close()
    return sorted(each.step for each in found if each is not None)


def limit_for(slots: int) -> int:
    """Bytes for so many slots, and for no other."""
    return slots * (2 * 4096 + 4096 * (layout_for(KIB).num_bytes // 4096 + 1)) + 100


def test_snapshots_leave_memory_while_the_home_hangs(
    keeper: int, faults: Path, tmp_path: Path, runtime: Path, cache: Path
) -> None:
    run = tmp_path / "run"
    (faults / "write.pause").touch()
    trainer = attached(run, runtime, cache, keep=10)
    assert keeper_pid(trainer.folder) == keeper
    for step in range(1, 8):  # three slots would be full
        trainer.snapshot(step, persist=True)
    wait_cached(trainer, *range(1, 8))
    assert steps_in(run, runtime, cache) == [*range(1, 8)]
    status = trainer.client.status()
    assert status.committed == ()
    assert [each.step for each in status.unsaved] == [*range(1, 8)]
    (faults / "write.pause").unlink()
    for step in range(1, 8):
        trainer.wait_committed(step)
    assert committed(run) == [*range(1, 8)]
    newest = max(trainer.slots, key=lambda slot: slot.state().generation)
    assert {slot.persisted for slot in trainer.slots if slot.asked} >= {newest.persisted}
    eventually(lambda: steps_in(run, runtime, cache) == [7])
    trainer.end()
    eventually(lambda: not files_of(run, runtime, cache))
    eventually(lambda: not list(cache.glob("*/*")))
    assert not passed_by(run)


def test_every_word_about_a_cached_snapshot_reaches_its_slot_in_memory(
    keeper: int, faults: Path, tmp_path: Path, runtime: Path, cache: Path
) -> None:
    (faults / "write").write_text("1 5")
    (faults / "write.long").touch()
    trainer = attached(tmp_path / "run", runtime, cache)
    slot, generation = trainer.snapshot(1, persist=True)
    eventually(lambda: slot.failed == generation)
    assert slot.cached == generation
    assert slot.persisted != generation
    status = trainer.client.status()
    assert [each.generation for each in status.failures] == [generation]
    assert status.failing == (1,)
    trainer.client.status(awaited=True)
    eventually(lambda: slot.persisted == generation)


def test_what_is_not_asked_for_at_home_rests_in_the_cache(
    keeper: int, faults: Path, tmp_path: Path, runtime: Path, cache: Path
) -> None:
    run = tmp_path / "run"
    (faults / "write.pause").touch()
    trainer = attached(run, runtime, cache, keep=10)
    trainer.snapshot(1, persist=True)
    for step in range(2, 13):
        trainer.snapshot(step, persist=True, home=False)
    eventually(lambda: steps_in(run, runtime, cache) == [1, 10, 11, 12])  # the newest few
    status = trainer.client.status()
    assert status.waiting == (1,)
    assert [each.step for each in status.unsaved] == [1]
    assert all(slot.home_ended == (0, 0) for slot in trainer.slots)
    (faults / "write.pause").unlink()
    trainer.wait_committed(1)
    order = trainer.attempt.number, 1
    eventually(lambda: all(slot.home_ended == order for slot in trainer.slots))
    assert steps_in(run, runtime, cache) == [1, 10, 11, 12]
    slot, generation = trainer.snapshot(13, persist=True, home=False)
    eventually(lambda: slot.cached == generation)
    slot.request_persist(generation)  # now it is
    trainer.wait_committed(13)
    assert committed(run) == [1, 13]
    eventually(lambda: steps_in(run, runtime, cache) == [13])
    trainer.end()
    eventually(lambda: not list(cache.glob("*/*")))


def test_what_is_not_asked_for_at_home_holds_no_slot_without_the_cache(
    tmp_path: Path, runtime: Path, cache: Path
) -> None:
    run = tmp_path / "run"
    (cache / "file").touch()
    trainer = attached(run, runtime, cache / "file")
    for step in range(1, 9):
        trainer.snapshot(step, persist=True, home=False)
    assert trainer.client.status().waiting == ()
    saved(trainer, 9)
    assert committed(run) == [9]
    trainer.end()


def test_what_fails_at_home_stays_until_a_few_newer_ones_are_cached(
    keeper: int, faults: Path, tmp_path: Path, runtime: Path, cache: Path
) -> None:
    """Other ranks may not have the newest in their caches yet."""
    run = tmp_path / "run"
    (faults / "write").write_text("1000 5")
    (faults / "write.long").touch()
    trainer = attached(run, runtime, cache)
    for step in range(1, 7):
        slot, generation = trainer.snapshot(10 * step, persist=True)
        eventually(lambda slot=slot, generation=generation: slot.failed == slot.cached == generation)
        for other in (1, 2, 3):
            trainer.snapshot(10 * step + other)
    wait_cached(trainer, 60)
    eventually(lambda: steps_in(run, runtime, cache) == [40, 50, 60])
    assert committed(run) == []
    trainer.end()


def test_a_commit_from_memory_makes_what_is_older_in_the_cache_useless(
    keeper: int, faults: Path, tmp_path: Path, runtime: Path, cache: Path
) -> None:
    run = tmp_path / "run"
    trainer = attached(run, runtime, cache, cache_limit=limit_for(1))
    trainer.snapshot(1, persist=True, home=False)
    wait_cached(trainer, 1)
    saved(trainer, 2)
    assert "cache_limit" in passed_by(run)[0]
    eventually(lambda: not files_of(run, runtime, cache))
    trainer.end()
    eventually(lambda: not list(cache.glob("*/*")))


def test_a_keeper_that_comes_after_another_goes_on_from_the_cache(
    faults: Path, tmp_path: Path, runtime: Path, cache: Path
) -> None:
    run = tmp_path / "run"
    with faulty_keeper(run, runtime, faults):
        (faults / "write.pause").touch()
        trainer = attached(run, runtime, cache, keep=10)
        slots = [trainer.snapshot(step, persist=True) for step in (1, 2, 3, 4, 5)]
        wait_cached(trainer, 1, 2, 3, 4, 5)
    trainer.client.tend()
    trainer.wait_committed(5)
    slot, generation = slots[-1]
    eventually(lambda: (slot.persisted, slot.cached) == (generation, generation))
    eventually(lambda: trainer.client.status().waiting == ())
    assert committed(run)[-1] == 5


@pytest.mark.parametrize("harm", ["flipped", "cut"])
def test_what_is_damaged_in_the_cache_goes_home_from_memory(
    keeper: int, faults: Path, tmp_path: Path, runtime: Path, cache: Path, harm: str
) -> None:
    run = tmp_path / "run"
    (faults / "write.pause").touch()
    trainer = attached(run, runtime, cache, keep=10)
    trainer.snapshot(1, persist=True)
    eventually((faults / "write.paused").exists)
    first = set(files_of(run, runtime, cache))
    slot, generation = trainer.snapshot(2, persist=True)
    wait_cached(trainer, 1, 2)
    (path,) = set(files_of(run, runtime, cache)) - first
    if harm == "flipped":
        flip(path, slot.image_offset + trainer.layout.data_start + 5)
    else:
        os.truncate(path, slot.image_offset + 4096)
    (faults / "write.pause").unlink()
    eventually(lambda: slot.persisted == generation)
    assert committed(run) == [1, 2]
    assert trainer.client.status().torn == ()
    eventually(lambda: any("is damaged" in each for each in passed_by(run)))
    trainer.end()


def test_a_request_for_the_home_ends_when_its_only_copy_is_damaged(
    keeper: int, faults: Path, tmp_path: Path, runtime: Path, cache: Path
) -> None:
    run = tmp_path / "run"
    (faults / "write.pause").touch()
    trainer = attached(run, runtime, cache, keep=10)
    trainer.snapshot(1, persist=True)
    eventually((faults / "write.paused").exists)
    first = set(files_of(run, runtime, cache))
    slot, _ = trainer.snapshot(2, persist=True)
    wait_cached(trainer, 1, 2)
    (path,) = set(files_of(run, runtime, cache)) - first
    flip(path, slot.image_offset + trainer.layout.data_start + 5)
    for step in (3, 4, 5):  # in the slots of the others
        trainer.snapshot(step, persist=True, home=False)
    wait_cached(trainer, 3, 4, 5)
    (faults / "write.pause").unlink()
    order = trainer.attempt.number, 2
    eventually(lambda: all(slot.home_ended == order for slot in trainer.slots))
    assert [each.step for each in trainer.client.status().torn] == [2]
    assert committed(run) == [1]
    trainer.end()


def test_a_cache_that_hangs_is_passed_by(
    keeper: int, faults: Path, tmp_path: Path, runtime: Path, cache: Path
) -> None:
    run = tmp_path / "run"
    (faults / "cache.pause").touch()
    trainer = attached(run, runtime, cache, slots=2, keep=10)
    for step in range(1, 6):  # none of them holds a slot
        trainer.snapshot(step, persist=True, home=False)
    saved(trainer, 6, 7)
    eventually(lambda: any("nothing for" in each for each in passed_by(run)))
    assert committed(run) == [6, 7]
    (faults / "cache.pause").unlink()

    def is_cached() -> bool:
        trainer.snapshot(trainer.client.status().newest_committed + 1, persist=True)  # type: ignore[operator]
        return bool(steps_in(run, runtime, cache))

    eventually(is_cached)
    trainer.end()


def test_a_disk_that_fails_for_a_moment_does_not_lose_the_newest(
    keeper: int, faults: Path, tmp_path: Path, runtime: Path, cache: Path
) -> None:
    run = tmp_path / "run"
    (faults / "write.pause").touch()
    trainer = attached(run, runtime, cache, keep=20)
    for step in range(1, 8):
        trainer.snapshot(step, persist=True)
    wait_cached(trainer, *range(1, 8))
    (faults / "cache.eio").touch()
    (faults / "write.pause").unlink()
    trainer.wait_committed(1)  # it was being written
    trainer.wait_committed(7)  # from memory
    eventually(lambda: any("cannot be read" in each for each in passed_by(run)))
    (faults / "cache.eio").unlink()
    eventually(lambda: trainer.client.status(awaited=True).waiting == ())
    assert {1, 7} <= {*committed(run)}
    assert trainer.client.status().torn == ()
    assert keeper_pid(trainer.folder) == keeper
    trainer.end()


class Ranks:
    """Two ranks of a node, in this process."""

    def __init__(self, run: Path, runtime: Path, cache: Path, **options: Any) -> None:
        about: dict[str, Any] = {"kib": KIB, "keep": 10, "world": 2, "ranks": (0, 1), **options}
        first = FakeTrainer(run, runtime, rank=0, cache=str(cache), **about)
        second = FakeTrainer(run, runtime, rank=1, cache=str(cache), join=str(first.attempt), **about)
        self.trainers = [first, second]

    def begin(self, parent: AttemptName | None = None, step: int = 0) -> None:
        for trainer in self.trainers:
            trainer.start(parent, step, "cache")
        for trainer in self.trainers:
            trainer.take_slots()

    def snapshot(self, step: int) -> None:
        for trainer in self.trainers:
            trainer.snapshot(step, persist=True)
        for trainer in self.trainers:
            trainer.ring.set_complete(trainer.attempt.number, step)


def test_a_step_may_be_cached_on_one_rank_and_passed_by_on_another(
    keeper: int, faults: Path, tmp_path: Path, runtime: Path, cache: Path
) -> None:
    run = tmp_path / "run"
    (faults / "write.pause").touch()
    ranks = Ranks(run, runtime, cache, cache_limit=limit_for(3))
    ranks.begin()
    ranks.snapshot(1)
    ranks.snapshot(2)
    eventually(lambda: passed_by(run))
    assert steps_in(run, runtime, cache) == [1, 1, 2]
    (faults / "write.pause").unlink()
    for step in (1, 2):
        ranks.trainers[1].wait_committed(step)
    assert committed(run) == [1, 2]
    for trainer in ranks.trainers:
        assert {slot.persisted for slot in trainer.slots} >= {slot.asked for slot in trainer.slots}
        trainer.end()


def test_what_can_never_be_committed_leaves_the_cache(
    keeper: int, faults: Path, tmp_path: Path, runtime: Path, cache: Path
) -> None:
    """A rank has passed the boundary of a snapshot that the other one has."""
    run = tmp_path / "run"
    ranks = Ranks(run, runtime, cache)
    ranks.begin()
    slot, generation = ranks.trainers[0].snapshot(1, persist=True)
    eventually(lambda: slot.cached == generation)
    ranks.trainers[1].snapshot(2, persist=True)
    eventually(lambda: slot.failed == generation)
    eventually(lambda: slot.cached == 0)
    saved(ranks.trainers[0], 2)
    assert committed(run) == [2]
    eventually(lambda: steps_in(run, runtime, cache) == [2, 2])
    assert slot.failed == generation
    for trainer in ranks.trainers:
        trainer.end()


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "late"])
def test_after_a_reboot_two_nodes_save_the_newest_that_both_have(
    is_late: bool, tmp_path: Path, runtime: Path, other_node: Path, cache: Path
) -> None:
    """`is_late`: when it is cached all ranks have newer ones in memory, which no cache has."""
    run, nodes = tmp_path / "run", {cache / "one": runtime, cache / "two": other_node}
    for place in nodes:
        place.mkdir()
    about: dict[str, Any] = {"kib": KIB, "world": 2, "keep": 10}
    trainers: list[FakeTrainer] = []

    def begin() -> list[FakeTrainer]:
        join = ""
        found = []
        for rank, (place, base) in enumerate(nodes.items()):
            found.append(FakeTrainer(run, base, rank=rank, cache=str(place), join=join, **about))
            join = str(found[0].attempt)
        return found

    trainers = begin()
    attempt = trainers[0].attempt
    for trainer in trainers:
        trainer.start()
        trainer.take_slots()
    for step in (1, 2):
        for trainer in trainers:
            trainer.snapshot(step, persist=True, home=False)
        for trainer in trainers:
            trainer.ring.set_complete(attempt.number, 9 if is_late else step)
    # Before the next one, which may take the slot of a snapshot that is not cached yet.
    for place, base in nodes.items():
        eventually(lambda place=place, base=base: 2 in steps_in(run, base, place))
    trainers[0].snapshot(3, persist=True, home=False)
    eventually(lambda: 3 in steps_in(run, runtime, cache / "one"))
    assert committed(run) == []
    for trainer in trainers:
        kill_keeper(trainer.folder)
        trainer.close()
        reboot(Path(trainer.folder.path).parents[1])
    again = begin()
    for trainer in again:
        trainer.client.surviving()
    eventually(lambda: 2 in committed(run))
    for trainer in again:
        trainer.start(attempt, 2, "cache")
    for trainer in again:
        trainer.end()


def test_what_waits_for_another_node_goes_once_a_newer_step_is_committed(
    tmp_path: Path, runtime: Path, other_node: Path, cache: Path
) -> None:
    run, caches = tmp_path / "run", (cache / "one", cache / "two")
    for place in caches:
        place.mkdir()
    about: dict[str, Any] = {"kib": KIB, "world": 2, "keep": 10}
    first = FakeTrainer(run, runtime, cache=str(caches[0]), **about)
    second = FakeTrainer(run, other_node, cache=str(caches[1]), rank=1, join=str(first.attempt), **about)
    for trainer in (first, second):
        trainer.start()
        trainer.take_slots()
    first.snapshot(1, persist=True)
    first.wait_for(lambda status: status.for_others == (1,))
    assert steps_in(run, runtime, caches[0]) == [1]
    first.snapshot(2, persist=True)
    second.snapshot(2, persist=True)
    for trainer in (first, second):
        trainer.wait_committed(2)
    eventually(lambda: steps_in(run, runtime, caches[0]) == [2])
    assert steps_in(run, other_node, caches[1]) == [2]
    assert committed(run) == [2]
    for trainer in (first, second):
        trainer.end()


def test_flipped_words_keep_nothing_from_the_home(
    faults: Path, tmp_path: Path, runtime: Path, cache: Path
) -> None:
    """Of what a file says beside its record nothing is believed: asked for, persisted, newest complete."""
    run = tmp_path / "run"
    attempt, files = left_in_the_cache(run, runtime, cache, faults, 1, 2)
    for offset in (320, 384, 672):
        flip(files[2], offset)  # its generation is 1
    trainer = FakeTrainer(run, runtime, kib=KIB, cache=str(cache))
    eventually(lambda: committed(run)[-1:] == [2])
    trainer.start(attempt, 2, "cache")
    trainer.end()
    assert committed(run)[-1:] == [2]


def test_the_cache_may_go_while_it_is_used(
    keeper: int, faults: Path, tmp_path: Path, runtime: Path, cache: Path
) -> None:
    run = tmp_path / "run"
    (faults / "write.pause").touch()
    trainer = attached(run, runtime, cache, keep=20)
    for step in range(1, 7):
        trainer.snapshot(step, persist=True, home=step < 4)
    wait_cached(trainer, *range(1, 7))
    shutil.rmtree(cache)
    eventually(lambda: passed_by(run))
    for step in range(7, 12):  # what is not asked for at home holds no slot
        trainer.snapshot(step, persist=True, home=False)
    (faults / "write.pause").unlink()
    for step in (1, 2, 3):  # their files have no name any more, and are open
        trainer.wait_committed(step)
    saved(trainer, 12)
    assert committed(run) == [1, 2, 3, 12]
    cache.mkdir(exist_ok=True)
    step = 13

    def is_cached_again() -> bool:
        nonlocal step
        saved(trainer, step)
        step += 1
        return bool(files_of(run, runtime, cache))

    eventually(is_cached_again)
    trainer.end()


def test_the_newest_has_the_space_of_older_ones_that_are_not_asked_for_at_home(
    keeper: int, faults: Path, tmp_path: Path, runtime: Path, cache: Path
) -> None:
    run = tmp_path / "run"
    (faults / "write.pause").touch()
    trainer = attached(run, runtime, cache, keep=20, cache_limit=limit_for(3))
    trainer.snapshot(1, persist=True)
    for step in range(2, 8):
        trainer.snapshot(step, persist=True, home=False)
        wait_cached(trainer, 1, step)
    assert steps_in(run, runtime, cache) == [1, 6, 7]
    assert not passed_by(run)
    (faults / "write.pause").unlink()
    trainer.wait_committed(1)
    trainer.end()


def test_a_cache_on_the_home_s_disk_is_passed_by(tmp_path: Path, runtime: Path) -> None:
    run, beside = tmp_path / "run", tmp_path / "cache"
    beside.mkdir()
    trainer = attached(run, runtime, beside)
    saved(trainer, 1)
    eventually(lambda: passed_by(run))
    assert "same disk" in passed_by(run)[0]
    assert not list(beside.iterdir())
    trainer.end()


def test_a_start_waits_for_a_lock_that_is_let_go(
    faults: Path, tmp_path: Path, runtime: Path, cache: Path
) -> None:
    """Of a keeper that is ending."""
    run = tmp_path / "run"
    attempt, files = left_in_the_cache(run, runtime, cache, faults, 1)
    other = CacheFolder.open(str(cache), files[1].parent.name)
    trainer = FakeTrainer(run, runtime, kib=KIB, cache=str(cache))
    found: list[int] = []
    asking = threading.Thread(target=lambda: found.extend(cached_steps(trainer)))
    asking.start()
    asking.join(0.3)
    assert asking.is_alive()
    other.close()
    asking.join()
    assert found == [1]
    trainer.start(attempt, 1, "cache")
    trainer.wait_committed(1)
    trainer.end()


def test_a_cache_that_is_taken_up_late_asks_for_nothing_of_a_run_that_trains(
    faults: Path, tmp_path: Path, runtime: Path, cache: Path
) -> None:
    run = tmp_path / "run"
    _, files = left_in_the_cache(run, runtime, cache, faults, 1)
    (faults / "cache.impatient").touch()
    other = CacheFolder.open(str(cache), files[1].parent.name)
    with faulty_keeper(run, runtime, faults):
        trainer = attached(run, runtime, cache)
        slot, generation = trainer.snapshot(5)
        eventually(lambda: passed_by(run))
        assert "Another keeper" in passed_by(run)[0]
        other.close()
        eventually(lambda: any(line.get("kind") == "cache" for line in ledger(run)))
        assert trainer.client.status().waiting in ((), (1,))
        assert slot.asked != generation
        trainer.end()


def test_a_file_of_another_version_is_left_alone(
    faults: Path, tmp_path: Path, runtime: Path, cache: Path
) -> None:
    run = tmp_path / "run"
    _, files = left_in_the_cache(run, runtime, cache, faults, 1)
    with open(files[1], "r+b") as file:
        head = bytearray(file.read(256))
        head[8] = 2
        head[240:] = _native.xxh3_128(bytes(head[:240]))
        file.seek(0)
        file.write(head)
    trainer = attached(run, runtime, cache)
    saved(trainer, 1)
    eventually(lambda: any("version 2" in each for each in passed_by(run)))
    folder = trainer.folder
    trainer.end()
    eventually(lambda: keeper_pid(folder) is None)
    assert files_of(run, runtime, cache) == [files[1]]


def test_constants_whose_file_was_removed_are_cached_again(
    keeper: int, faults: Path, tmp_path: Path, runtime: Path, cache: Path
) -> None:
    """A cleaner removes what is old."""
    run = tmp_path / "run"
    (faults / "write.pause").touch()
    trainer = attached(run, runtime, cache, constants_kib=32, keep=20)
    for step in (1, 2, 3, 4, 5):
        trainer.snapshot(step, persist=True)
    wait_cached(trainer, 1, 2, 3, 4, 5)
    (constants,) = [each for each in files_of(run, runtime, cache) if "constants" in each.name]
    constants.unlink()
    eventually(lambda: passed_by(run))
    (faults / "write.pause").unlink()
    step = 5

    def is_there_again() -> bool:
        nonlocal step
        step += 1
        saved(trainer, step)
        return constants.exists()

    eventually(is_there_again)
    trainer.end()
    assert committed(run)[-1] == step


def test_constants_whose_record_is_damaged_end_no_keeper(
    keeper: int, tmp_path: Path, runtime: Path, cache: Path
) -> None:
    run = tmp_path / "run"
    trainer = attached(run, runtime, cache, constants_kib=32)
    saved(trainer, 1)
    for path in files_of(run, runtime, cache):
        path.unlink()
    eventually(lambda: passed_by(run))
    assert trainer.region is not None
    digests = trainer._region_digests()
    trainer._region_digests = lambda: digests  # type: ignore[method-assign]
    os.pwrite(trainer.region.descriptor, b"\xff", 768 + 40)
    trainer.snapshot(2, persist=True)
    trainer.wait_committed(2)  # a file of them stands already
    assert keeper_pid(trainer.folder) == keeper


def test_the_cache_stays_while_it_has_what_waits_for_another_node(
    tmp_path: Path, runtime: Path, cache: Path
) -> None:
    run = tmp_path / "run"
    trainer = attached(run, runtime, cache, world=2)
    trainer.snapshot(1, persist=True)
    trainer.wait_for(lambda status: status.for_others == (1,))
    folder = trainer.folder
    trainer.end()
    # As the keeper of rank 0's node does, so that this one need not watch for it.
    mark_ended(trainer.store, trainer.attempt, "closed")
    eventually(lambda: keeper_pid(folder) is None)
    assert steps_in(run, runtime, cache) == [1]


def test_two_runs_share_a_cache(tmp_path: Path, runtime: Path, cache: Path) -> None:
    trainers = [attached(tmp_path / name, runtime, cache) for name in ("one", "two")]
    for trainer in trainers:
        saved(trainer, 1)
    for trainer in trainers:
        assert steps_in(trainer.run, runtime, cache) == [1]
    trainers[0].end()
    eventually(lambda: not files_of(tmp_path / "one", runtime, cache))
    assert steps_in(tmp_path / "two", runtime, cache) == [1]
    trainers[1].end()


@pytest.mark.parametrize("point", ["cache.pinned", "cache.written", "cache.named"])
def test_a_keeper_killed_around_the_copy_loses_nothing(
    tmp_path: Path, runtime: Path, cache: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    monkeypatch.setenv("FLASHCKPT_CRASH_AT", point)
    trainer = attached(run, runtime, cache, keep=10)
    pid = keeper_pid(trainer.folder)
    trainer.snapshot(1, persist=True)
    eventually(lambda: keeper_pid(trainer.folder) != pid)
    monkeypatch.delenv("FLASHCKPT_CRASH_AT")
    trainer.client.tend()
    trainer.wait_committed(1)
    assert committed(run) == [1]
    # The next keeper may have persisted it from memory, before it was told of a cache.
    assert steps_in(run, runtime, cache) in ([], [1])
    saved(trainer, 2)
    eventually(lambda: steps_in(run, runtime, cache) == [2])
    (folder,) = {path.parent for path in files_of(run, runtime, cache)}
    assert len(os.listdir(folder)) == 2
    trainer.end()


def test_after_a_death_the_folder_stays_and_what_is_committed_is_not_written_again(
    tmp_path: Path, runtime: Path, cache: Path
) -> None:
    run = tmp_path / "run"
    job = begun_process(run, runtime, kib=KIB, cache=str(cache), keep=1, linger_s=0.1)
    job.save(1, 2)
    eventually(lambda: steps_in(run, runtime, cache) == [2])
    job.kill()
    folder = runtime_of(run, runtime)
    eventually(lambda: keeper_pid(folder) is None)
    assert steps_in(run, runtime, cache) == [2]
    trainer = FakeTrainer(run, runtime, kib=KIB, cache=str(cache), keep=1)
    assert [grant.kind for grant in trainer.client.surviving()] == ["cache"]
    assert trainer.client.status().waiting == ()
    (path,) = files_of(run, runtime, cache)
    with contextlib.closing(open_cached(str(path))) as slot:
        assert slot.persisted == slot.state().generation
    trainer.start(AttemptName.parse(job.attempt), 2, "cache")
    assert len([line for line in ledger(run) if line["event"] == "persist"]) == 2
    trainer.end()
