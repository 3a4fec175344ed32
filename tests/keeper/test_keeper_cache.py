"""Snapshots in the cache of a node: on their way home, after deaths, and where it cannot be used."""

import contextlib
import os
import shutil
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from flashckpt import _native
from flashckpt.commit.attempts import mark_ended
from flashckpt.format.names import AttemptName
from flashckpt.memory.cache_folder import CacheFolder, cached_paths, open_cached
from tests.events import ledger
from tests.folders import flip
from tests.keeper.driver import (
    begun,
    begun_process,
    committed,
    eventually,
    kill_keeper,
    runtime_of,
    saved,
)
from tests.keeper.fake import FakeTrainer, content, keeper_pid, layout_for
from tests.keeper.faulty import faulty_keeper

KIB = 64


@dataclass
class Scene:
    """A run, its node's memory, and a cache on another device than the run."""

    run: Path
    runtime: Path
    cache: Path
    faults: Path

    def about(self, **options: Any) -> dict[str, Any]:
        """The options of a trainer."""
        return {"kib": KIB, "cache": str(self.cache), **options}

    def trainer(self, **options: Any) -> FakeTrainer:
        return FakeTrainer(self.run, self.runtime, **self.about(**options))

    def attached(self, slots: int = 3, **options: Any) -> FakeTrainer:
        """A trainer whose attempt has begun, with slots."""
        return begun(self.run, self.runtime, slots=slots, **self.about(**options))

    def files(self) -> list[Path]:
        identity = os.path.basename(runtime_of(self.run, self.runtime).path)
        return [Path(each) for each in cached_paths(str(self.cache), identity)]

    def steps(self) -> list[int]:
        """The steps of the cached slots, each of which is whole."""
        found = []
        for path in self.files():
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
                    data = os.pread(slot.image_descriptor, leaf.num_bytes, start)
                    assert data == content(leaf, sealed.step)
                found.append(sealed.step)
            slot.close()
        return sorted(found)

    def passed_by(self) -> list[str]:
        lines = [line for line in ledger(self.run) if line["event"] == "error"]
        return [line["message"] for line in lines if line["what"] == "cache"]

    def is_empty(self) -> bool:
        return not list(self.cache.glob("*/*"))

    def reboot(self) -> None:
        """Everything in memory is gone."""
        for entry in self.runtime.rglob("*"):
            if not entry.is_dir():
                entry.unlink(missing_ok=True)

    def left(self, *steps: int) -> tuple[AttemptName | None, dict[int, Path]]:
        """An attempt that died with steps in the cache alone. Its name, and the file of each step."""
        found = dict[int, Path]()
        with faulty_keeper(self.run, self.runtime, self.faults):
            (self.faults / "write.pause").touch()
            job = begun_process(self.run, self.runtime, **self.about())
            for step in steps:
                job.do("snapshot", step, True)
                eventually(lambda step=step: step in self.steps())
                new = set(self.files()) - {*found.values()}
                [found[step]] = [path for path in new if "constants" not in path.name]
            job.kill()
        self.reboot()
        return AttemptName.parse(job.attempt), found


@pytest.fixture
def scene(cache: Path, run: Path, runtime: Path, faults: Path) -> Scene:
    return Scene(run, runtime, cache, faults)


def wait_cached(trainer: FakeTrainer, *steps: int) -> None:
    def has(status: Any) -> bool:
        return status.cache is not None and {*steps} <= {each.step for each in status.cache.cached}

    trainer.wait_for(has)


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


def test_snapshots_leave_memory_while_the_home_hangs(scene: Scene, keeper: int) -> None:
    (scene.faults / "write.pause").touch()
    trainer = scene.attached(keep=10)
    assert keeper_pid(trainer.folder) == keeper
    for step in range(1, 8):  # three slots would be full
        trainer.snapshot(step, persist=True)
    wait_cached(trainer, *range(1, 8))
    assert scene.steps() == [*range(1, 8)]
    status = trainer.client.status()
    assert status.committed == ()
    assert [each.step for each in status.unsaved] == [*range(1, 8)]
    (scene.faults / "write.pause").unlink()
    for step in range(1, 8):
        trainer.wait_committed(step)
    assert committed(scene.run) == [*range(1, 8)]
    newest = max(trainer.slots, key=lambda slot: slot.state().generation)
    assert {slot.persisted for slot in trainer.slots if slot.asked} >= {newest.persisted}
    eventually(lambda: scene.steps() == [7])
    trainer.end()
    eventually(lambda: not scene.files())
    eventually(scene.is_empty)
    assert not scene.passed_by()


def test_every_word_about_a_cached_snapshot_reaches_its_slot_in_memory(scene: Scene, keeper: int) -> None:
    (scene.faults / "write").write_text("1 5")
    (scene.faults / "write.long").touch()
    trainer = scene.attached()
    slot, generation = trainer.snapshot(1, persist=True)
    eventually(lambda: slot.failed == generation)
    assert slot.cached == generation
    assert slot.persisted != generation
    status = trainer.client.status()
    assert [each.generation for each in status.failures] == [generation]
    assert status.failing == (1,)
    trainer.client.status(awaited=True)
    eventually(lambda: slot.persisted == generation)


def test_what_is_not_asked_for_at_home_rests_in_the_cache(scene: Scene, keeper: int) -> None:
    (scene.faults / "write.pause").touch()
    trainer = scene.attached(keep=10)
    trainer.snapshot(1, persist=True)
    for step in range(2, 13):
        trainer.snapshot(step, persist=True, home=False)
    eventually(lambda: scene.steps() == [1, 10, 11, 12])  # the newest few
    status = trainer.client.status()
    assert status.waiting == (1,)
    assert [each.step for each in status.unsaved] == [1]
    assert all(slot.home_ended == (0, 0) for slot in trainer.slots)
    (scene.faults / "write.pause").unlink()
    trainer.wait_committed(1)
    order = trainer.attempt.number, 1
    eventually(lambda: all(slot.home_ended == order for slot in trainer.slots))
    assert scene.steps() == [1, 10, 11, 12]
    slot, generation = trainer.snapshot(13, persist=True, home=False)
    eventually(lambda: slot.cached == generation)
    slot.request_persist(generation)  # now it is
    trainer.wait_committed(13)
    assert committed(scene.run) == [1, 13]
    eventually(lambda: scene.steps() == [13])
    trainer.end()
    eventually(scene.is_empty)


def test_what_is_not_asked_for_at_home_holds_no_slot_without_the_cache(scene: Scene) -> None:
    scene.cache /= "file"
    scene.cache.touch()
    trainer = scene.attached()
    for step in range(1, 9):
        trainer.snapshot(step, persist=True, home=False)
    assert trainer.client.status().waiting == ()
    saved(trainer, 9)
    assert committed(scene.run) == [9]


def test_what_fails_at_home_stays_until_a_few_newer_ones_are_cached(scene: Scene, keeper: int) -> None:
    """Other ranks may not have the newest in their caches yet."""
    (scene.faults / "write").write_text("1000 5")
    (scene.faults / "write.long").touch()
    trainer = scene.attached()
    for step in range(1, 7):
        slot, generation = trainer.snapshot(10 * step, persist=True)
        eventually(lambda slot=slot, generation=generation: slot.failed == slot.cached == generation)
        for other in (1, 2, 3):
            trainer.snapshot(10 * step + other)
    wait_cached(trainer, 60)
    eventually(lambda: scene.steps() == [40, 50, 60])
    assert committed(scene.run) == []


def test_a_commit_from_memory_makes_what_is_older_in_the_cache_useless(scene: Scene, keeper: int) -> None:
    trainer = scene.attached(cache_limit=limit_for(1))
    trainer.snapshot(1, persist=True, home=False)
    wait_cached(trainer, 1)
    saved(trainer, 2)
    assert "cache_limit" in scene.passed_by()[0]
    eventually(lambda: not scene.files())
    trainer.end()
    eventually(scene.is_empty)


def test_a_keeper_that_comes_after_another_goes_on_from_the_cache(scene: Scene) -> None:
    with faulty_keeper(scene.run, scene.runtime, scene.faults):
        (scene.faults / "write.pause").touch()
        trainer = scene.attached(keep=10)
        slots = [trainer.snapshot(step, persist=True) for step in (1, 2, 3, 4, 5)]
        wait_cached(trainer, 1, 2, 3, 4, 5)
    trainer.client.tend()
    trainer.wait_committed(5)
    slot, generation = slots[-1]
    eventually(lambda: (slot.persisted, slot.cached) == (generation, generation))
    eventually(lambda: trainer.client.status().waiting == ())
    assert committed(scene.run)[-1] == 5


@pytest.mark.parametrize("harm", ["flipped", "cut"])
def test_what_is_damaged_in_the_cache_goes_home_from_memory(scene: Scene, keeper: int, harm: str) -> None:
    (scene.faults / "write.pause").touch()
    trainer = scene.attached(keep=10)
    trainer.snapshot(1, persist=True)
    eventually((scene.faults / "write.paused").exists)
    first = set(scene.files())
    slot, generation = trainer.snapshot(2, persist=True)
    wait_cached(trainer, 1, 2)
    (path,) = set(scene.files()) - first
    if harm == "flipped":
        flip(path, slot.image_offset + trainer.layout.data_start + 5)
    else:
        os.truncate(path, slot.image_offset + 4096)
    (scene.faults / "write.pause").unlink()
    eventually(lambda: slot.persisted == generation)
    assert committed(scene.run) == [1, 2]
    assert trainer.client.status().torn == ()
    eventually(lambda: any("is damaged" in each for each in scene.passed_by()))


def test_a_request_for_the_home_ends_when_its_only_copy_is_damaged(scene: Scene, keeper: int) -> None:
    (scene.faults / "write.pause").touch()
    trainer = scene.attached(keep=10)
    trainer.snapshot(1, persist=True)
    eventually((scene.faults / "write.paused").exists)
    first = set(scene.files())
    slot, _ = trainer.snapshot(2, persist=True)
    wait_cached(trainer, 1, 2)
    (path,) = set(scene.files()) - first
    flip(path, slot.image_offset + trainer.layout.data_start + 5)
    for step in (3, 4, 5):  # in the slots of the others
        trainer.snapshot(step, persist=True, home=False)
    wait_cached(trainer, 3, 4, 5)
    (scene.faults / "write.pause").unlink()
    order = trainer.attempt.number, 2
    eventually(lambda: all(slot.home_ended == order for slot in trainer.slots))
    assert [each.step for each in trainer.client.status().torn] == [2]
    assert committed(scene.run) == [1]


def test_a_cache_that_hangs_is_passed_by(scene: Scene, keeper: int) -> None:
    (scene.faults / "cache.pause").touch()
    trainer = scene.attached(slots=2, keep=10)
    for step in range(1, 6):  # none of them holds a slot
        trainer.snapshot(step, persist=True, home=False)
    saved(trainer, 6, 7)
    eventually(lambda: any("nothing for" in each for each in scene.passed_by()))
    assert committed(scene.run) == [6, 7]
    (scene.faults / "cache.pause").unlink()

    def is_cached() -> bool:
        trainer.snapshot(trainer.client.status().newest_committed + 1, persist=True)  # type: ignore[operator]
        return bool(scene.steps())

    eventually(is_cached)


def test_a_disk_that_fails_for_a_moment_does_not_lose_the_newest(scene: Scene, keeper: int) -> None:
    (scene.faults / "write.pause").touch()
    trainer = scene.attached(keep=20)
    for step in range(1, 8):
        trainer.snapshot(step, persist=True)
    wait_cached(trainer, *range(1, 8))
    (scene.faults / "cache.eio").touch()
    (scene.faults / "write.pause").unlink()
    trainer.wait_committed(1)  # it was being written
    trainer.wait_committed(7)  # from memory
    eventually(lambda: any("cannot be read" in each for each in scene.passed_by()))
    (scene.faults / "cache.eio").unlink()
    eventually(lambda: trainer.client.status(awaited=True).waiting == ())
    assert {1, 7} <= {*committed(scene.run)}
    assert trainer.client.status().torn == ()
    assert keeper_pid(trainer.folder) == keeper


class Ranks:
    """Two ranks of a node, in this process."""

    def __init__(self, scene: Scene, **options: Any) -> None:
        about: dict[str, Any] = {"keep": 10, "world": 2, "ranks": (0, 1), **options}
        first = scene.trainer(rank=0, **about)
        self.trainers = [first, scene.trainer(rank=1, join=str(first.attempt), **about)]
        for trainer in self.trainers:
            trainer.start()
        for trainer in self.trainers:
            trainer.take_slots()

    def snapshot(self, step: int) -> None:
        for trainer in self.trainers:
            trainer.snapshot(step, persist=True)
        for trainer in self.trainers:
            trainer.ring.set_complete(trainer.attempt.number, step)


def test_a_step_may_be_cached_on_one_rank_and_passed_by_on_another(scene: Scene, keeper: int) -> None:
    (scene.faults / "write.pause").touch()
    ranks = Ranks(scene, cache_limit=limit_for(3))
    ranks.snapshot(1)
    ranks.snapshot(2)
    eventually(lambda: scene.passed_by())
    assert scene.steps() == [1, 1, 2]
    (scene.faults / "write.pause").unlink()
    for step in (1, 2):
        ranks.trainers[1].wait_committed(step)
    assert committed(scene.run) == [1, 2]
    for trainer in ranks.trainers:
        assert {slot.persisted for slot in trainer.slots} >= {slot.asked for slot in trainer.slots}
        trainer.end()


def test_what_can_never_be_committed_leaves_the_cache(scene: Scene, keeper: int) -> None:
    """A rank has passed the boundary of a snapshot that the other one has."""
    ranks = Ranks(scene)
    slot, generation = ranks.trainers[0].snapshot(1, persist=True)
    eventually(lambda: slot.cached == generation)
    ranks.trainers[1].snapshot(2, persist=True)
    eventually(lambda: slot.failed == generation)
    eventually(lambda: slot.cached == 0)
    saved(ranks.trainers[0], 2)
    assert committed(scene.run) == [2]
    eventually(lambda: scene.steps() == [2, 2])
    assert slot.failed == generation


def two_nodes(scene: Scene, other_node: Path) -> list[Scene]:
    """Two nodes of a job, each with a cache of its own."""
    nodes = [replace(scene, cache=scene.cache / "one")]
    nodes.append(replace(scene, runtime=other_node, cache=scene.cache / "two"))
    for node in nodes:
        node.cache.mkdir()
    return nodes


def ranks_of(nodes: list[Scene]) -> list[FakeTrainer]:
    """An attempt of two ranks, one on each node."""
    first = nodes[0].trainer(world=2, keep=10)
    return [first, nodes[1].trainer(world=2, keep=10, rank=1, join=str(first.attempt))]


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "late"])
def test_after_a_reboot_two_nodes_save_the_newest_that_both_have(
    scene: Scene, other_node: Path, is_late: bool
) -> None:
    """`is_late`: when it is cached all ranks have newer ones in memory, which no cache has."""
    nodes = two_nodes(scene, other_node)
    trainers = ranks_of(nodes)
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
    for node in nodes:
        eventually(lambda node=node: 2 in node.steps())
    trainers[0].snapshot(3, persist=True, home=False)
    eventually(lambda: 3 in nodes[0].steps())
    assert committed(scene.run) == []
    for trainer, node in zip(trainers, nodes, strict=True):
        kill_keeper(trainer.folder)
        trainer.close()
        node.reboot()
    again = ranks_of(nodes)
    for trainer in again:
        trainer.client.surviving()
    eventually(lambda: 2 in committed(scene.run))
    for trainer in again:
        trainer.start(attempt, 2, "cache")


def test_what_waits_for_another_node_goes_once_a_newer_step_is_committed(
    scene: Scene, other_node: Path
) -> None:
    here, there = nodes = two_nodes(scene, other_node)
    first, second = ranks_of(nodes)
    for trainer in (first, second):
        trainer.start()
        trainer.take_slots()
    first.snapshot(1, persist=True)
    first.wait_for(lambda status: status.for_others == (1,))
    assert here.steps() == [1]
    first.snapshot(2, persist=True)
    second.snapshot(2, persist=True)
    for trainer in (first, second):
        trainer.wait_committed(2)
    eventually(lambda: here.steps() == [2])
    assert there.steps() == [2]
    assert committed(scene.run) == [2]


def test_flipped_words_keep_nothing_from_the_home(scene: Scene) -> None:
    """Of what a file says beside its record nothing is believed: asked for, persisted, newest complete."""
    attempt, files = scene.left(1, 2)
    for offset in (320, 384, 672):
        flip(files[2], offset)  # its generation is 1
    trainer = scene.trainer()
    eventually(lambda: committed(scene.run)[-1:] == [2])
    trainer.start(attempt, 2, "cache")
    trainer.end()
    assert committed(scene.run)[-1:] == [2]


def test_the_cache_may_go_while_it_is_used(scene: Scene, keeper: int) -> None:
    (scene.faults / "write.pause").touch()
    trainer = scene.attached(keep=20)
    for step in range(1, 7):
        trainer.snapshot(step, persist=True, home=step < 4)
    wait_cached(trainer, *range(1, 7))
    shutil.rmtree(scene.cache)
    eventually(lambda: scene.passed_by())
    for step in range(7, 12):  # what is not asked for at home holds no slot
        trainer.snapshot(step, persist=True, home=False)
    (scene.faults / "write.pause").unlink()
    for step in (1, 2, 3):  # their files have no name any more, and are open
        trainer.wait_committed(step)
    saved(trainer, 12)
    assert committed(scene.run) == [1, 2, 3, 12]
    scene.cache.mkdir(exist_ok=True)
    step = 13

    def is_cached_again() -> bool:
        nonlocal step
        saved(trainer, step)
        step += 1
        return bool(scene.files())

    eventually(is_cached_again)


def test_the_newest_has_the_space_of_older_ones_that_are_not_asked_for_at_home(
    scene: Scene, keeper: int
) -> None:
    (scene.faults / "write.pause").touch()
    trainer = scene.attached(keep=20, cache_limit=limit_for(3))
    trainer.snapshot(1, persist=True)
    for step in range(2, 8):
        trainer.snapshot(step, persist=True, home=False)
        wait_cached(trainer, 1, step)
    assert scene.steps() == [1, 6, 7]
    assert not scene.passed_by()
    (scene.faults / "write.pause").unlink()
    trainer.wait_committed(1)


def test_a_cache_on_the_home_s_disk_is_passed_by(scene: Scene) -> None:
    scene.cache = scene.run.with_name("cache")
    scene.cache.mkdir()
    trainer = scene.attached()
    saved(trainer, 1)
    eventually(lambda: scene.passed_by())
    assert "same disk" in scene.passed_by()[0]
    assert not list(scene.cache.iterdir())


def test_a_start_waits_for_a_lock_that_is_let_go(scene: Scene) -> None:
    """Of a keeper that is ending."""
    attempt, files = scene.left(1)
    other = CacheFolder.open(str(scene.cache), files[1].parent.name)
    trainer = scene.trainer()
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


def test_a_cache_that_is_taken_up_late_asks_for_nothing_of_a_run_that_trains(scene: Scene) -> None:
    _, files = scene.left(1)
    (scene.faults / "cache.impatient").touch()
    other = CacheFolder.open(str(scene.cache), files[1].parent.name)
    with faulty_keeper(scene.run, scene.runtime, scene.faults):
        trainer = scene.attached()
        slot, generation = trainer.snapshot(5)
        eventually(lambda: scene.passed_by())
        assert "Another keeper" in scene.passed_by()[0]
        other.close()
        eventually(lambda: any(line.get("kind") == "cache" for line in ledger(scene.run)))
        assert trainer.client.status().waiting in ((), (1,))
        assert slot.asked != generation


def test_a_file_of_another_version_is_left_alone(scene: Scene) -> None:
    _, files = scene.left(1)
    with open(files[1], "r+b") as file:
        head = bytearray(file.read(256))
        head[8] = 2
        head[240:] = _native.xxh3_128(bytes(head[:240]))
        file.seek(0)
        file.write(head)
    trainer = scene.attached()
    saved(trainer, 1)
    eventually(lambda: any("version 2" in each for each in scene.passed_by()))
    folder = trainer.folder
    trainer.end()
    eventually(lambda: keeper_pid(folder) is None)
    assert scene.files() == [files[1]]


def test_constants_whose_file_was_removed_are_cached_again(scene: Scene, keeper: int) -> None:
    """A cleaner removes what is old."""
    (scene.faults / "write.pause").touch()
    trainer = scene.attached(constants_kib=32, keep=20)
    for step in (1, 2, 3, 4, 5):
        trainer.snapshot(step, persist=True)
    wait_cached(trainer, 1, 2, 3, 4, 5)
    (constants,) = [each for each in scene.files() if "constants" in each.name]
    constants.unlink()
    eventually(lambda: scene.passed_by())
    (scene.faults / "write.pause").unlink()
    step = 5

    def is_there_again() -> bool:
        nonlocal step
        step += 1
        saved(trainer, step)
        return constants.exists()

    eventually(is_there_again)
    trainer.end()
    assert committed(scene.run)[-1] == step


def test_constants_whose_record_is_damaged_end_no_keeper(scene: Scene, keeper: int) -> None:
    trainer = scene.attached(constants_kib=32)
    saved(trainer, 1)
    for path in scene.files():
        path.unlink()
    eventually(lambda: scene.passed_by())
    assert trainer.region is not None
    digests = trainer._region_digests()
    trainer._region_digests = lambda: digests  # type: ignore[method-assign]
    os.pwrite(trainer.region.descriptor, b"\xff", 768 + 40)
    trainer.snapshot(2, persist=True)
    trainer.wait_committed(2)  # a file of them stands already
    assert keeper_pid(trainer.folder) == keeper


def test_the_cache_stays_while_it_has_what_waits_for_another_node(scene: Scene) -> None:
    trainer = scene.attached(world=2)
    trainer.snapshot(1, persist=True)
    trainer.wait_for(lambda status: status.for_others == (1,))
    folder = trainer.folder
    trainer.end()
    # As the keeper of rank 0's node does, so that this one need not watch for it.
    mark_ended(trainer.store, trainer.attempt, "closed")
    eventually(lambda: keeper_pid(folder) is None)
    assert scene.steps() == [1]


def test_two_runs_share_a_cache(scene: Scene) -> None:
    other = replace(scene, run=scene.run.with_name("other"))
    first, second = scene.attached(), other.attached()
    saved(first, 1)
    saved(second, 1)
    assert scene.steps() == other.steps() == [1]
    first.end()
    eventually(lambda: not scene.files())
    assert other.steps() == [1]


@pytest.mark.parametrize("point", ["cache.pinned", "cache.written", "cache.named"])
def test_a_keeper_killed_around_the_copy_loses_nothing(
    scene: Scene, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHCKPT_CRASH_AT", point)
    trainer = scene.attached(keep=10)
    pid = keeper_pid(trainer.folder)
    trainer.snapshot(1, persist=True)
    eventually(lambda: keeper_pid(trainer.folder) != pid)
    monkeypatch.delenv("FLASHCKPT_CRASH_AT")
    trainer.client.tend()
    trainer.wait_committed(1)
    assert committed(scene.run) == [1]
    # The next keeper may have persisted it from memory, before it was told of a cache.
    assert scene.steps() in ([], [1])
    saved(trainer, 2)
    eventually(lambda: scene.steps() == [2])
    (folder,) = {path.parent for path in scene.files()}
    assert len(os.listdir(folder)) == 2


def test_after_a_death_the_folder_stays_and_what_is_committed_is_not_written_again(
    scene: Scene,
) -> None:
    job = begun_process(scene.run, scene.runtime, **scene.about(keep=1, linger_s=0.1))
    job.save(1, 2)
    eventually(lambda: scene.steps() == [2])
    job.kill()
    folder = runtime_of(scene.run, scene.runtime)
    eventually(lambda: keeper_pid(folder) is None)
    assert scene.steps() == [2]
    trainer = scene.trainer(keep=1)
    assert [grant.kind for grant in trainer.client.surviving()] == ["cache"]
    assert trainer.client.status().waiting == ()
    (path,) = scene.files()
    with contextlib.closing(open_cached(str(path))) as slot:
        assert slot.persisted == slot.state().generation
    trainer.start(AttemptName.parse(job.attempt), 2, "cache")
    assert len([line for line in ledger(scene.run) if line["event"] == "persist"]) == 2
