"""The contract of a catalogue on a store that exists. A subclass provides the fixture `opener`."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

import pytest

from flashckpt.catalogue.changes import end, parent_of, quarantine
from flashckpt.catalogue.home import Home
from flashckpt.catalogue.requests import Stores
from flashckpt.errors import DamagedError, RunError, RunHeldError, SupersededError, UnusableRunError
from flashckpt.format.catalogue import CATALOGUE, Catalogue, Checkpoint, Folder, version_path
from flashckpt.format.manifest import FrozenFile
from flashckpt.format.names import SnapshotId
from flashckpt.options import Keep
from flashckpt.store.base import Store
from tests.catalogue.processes import start_in
from tests.catalogue.snapshots import HOME, RUN, Job, boundaries, faults, files_of, nonce, write_part


class CatalogueContract:
    @pytest.fixture
    def store(self, opener: Callable[[], Store]) -> Store:
        return opener()

    def test_a_run_from_its_first_version(self, store: Store) -> None:
        job = Job(store)
        for boundary in range(1, 6):
            job.save(boundary)
        assert boundaries(job.catalogue) == [4, 5]
        assert job.catalogue.version == 7
        assert faults(store) == []
        folders = [entry.name for entry in store.list(f"data/{job.name}")]
        assert folders == [Folder(job.name, SnapshotId(job.name, each)).name for each in (4, 5)]
        assert Stores({"home": store}).run(HOME.newest()) == job.catalogue

    def test_an_attempt_resumes_and_the_one_before_is_superseded(self, store: Store) -> None:
        first = Job(store)
        first.save(1)
        second = Job(store)
        assert parent_of(second.catalogue) == SnapshotId(first.name, 1)
        with pytest.raises(SupersededError, match="taken over"):
            first.save(2)
        second.save(3)
        assert faults(store) == []
        assert [each.id.attempt for each in second.catalogue.checkpoints] == [first.name, second.name]

    def test_whole_snapshots_of_a_dead_job_are_adopted(self, store: Store) -> None:
        first = Job(store)
        first.save(1)
        for boundary, ranks in ((2, (0, 1)), (3, (0,))):
            first.write(SnapshotId(first.name, boundary), ranks, 2)
        second = Job(store)
        assert boundaries(second.catalogue) == [1, 2]
        assert parent_of(second.catalogue) == SnapshotId(first.name, 2)
        second.run(HOME.collect(second.catalogue))
        assert faults(store) == []

    def test_a_replaced_keeper_and_the_other_node(self, store: Store) -> None:
        job = Job(store)
        id = SnapshotId(job.name, 1)
        job.write(id, (0,), 4)
        job.write(id, (0, 1), 4)
        assert job.commit(id, Keep(last=2)) is None
        job.write(id, (0, 1), 4)
        job.write(id, (2, 3), 4)
        made = job.commit(id, Keep(last=2))
        assert made.num_bytes > 46
        assert faults(store) == []

    def test_parts_that_contradict_each_other(self, store: Store) -> None:
        job = Job(store)
        job.save(1)
        folder = Folder(job.name, SnapshotId(job.name, 2))
        write_part(store, folder, (0,), 2)
        write_part(store, folder, (0,), 1)
        with pytest.raises(DamagedError, match="different steps or numbers"):
            job.commit(folder.id, Keep(last=2))
        assert parent_of(Job(store).catalogue) == SnapshotId(job.name, 1)

    def test_frozen_files_stay_as_long_as_a_checkpoint_names_them(self, store: Store) -> None:
        job = Job(store)
        frozen = FrozenFile(Folder(job.name, SnapshotId(job.name, 1)), "frozen-00000-5f2c.safetensors", 7)
        for boundary in (1, 2, 3, 4):
            job.save(boundary, frozen=frozen)
        path = f"{frozen.base.path}/{frozen.name}"
        assert files_of(store, frozen.base.path) == [path]
        assert faults(store) == []
        for boundary in (5, 6):
            job.save(boundary)
        assert files_of(store, frozen.base.path) == []
        job.write(SnapshotId(job.name, 7), frozen=frozen)
        assert job.commit(SnapshotId(job.name, 7), Keep(last=2)) is None

    def test_one_of_many_starts_wins(self, opener: Callable[[], Store]) -> None:
        Job(opener()).save(1)
        count, barrier = 4, Barrier(4)

        def start() -> Catalogue | None:
            store = opener()
            barrier.wait()
            try:
                return Stores({"home": store}).run(start_in(HOME, RUN, nonce()))
            except RunHeldError:
                return None

        with ThreadPoolExecutor(count) as pool:
            won = [each for each in pool.map(lambda _: start(), range(count)) if each is not None]
        last = Stores({"home": opener()}).run(HOME.newest())
        assert last in won
        assert len({each.version for each in won}) == len(won)
        assert boundaries(last) == [1]

    def test_concurrent_changes_are_all_applied(self, opener: Callable[[], Store]) -> None:
        job = Job(opener())
        for boundary in range(1, 9):
            job.save(boundary, Keep(last=9))
        checkpoints = job.catalogue.checkpoints[:5]

        def mark(checkpoint: Checkpoint) -> None:
            change = partial(quarantine, checkpoint=checkpoint, why="two reads differ")
            Stores({"home": opener()}).run(HOME.update(change))

        with ThreadPoolExecutor(len(checkpoints)) as pool:
            list(pool.map(mark, checkpoints))
        last = job.run(HOME.newest())
        assert last.damaged_ids == {each.id for each in checkpoints}
        assert last.version == job.catalogue.version + len(checkpoints)

    def test_old_versions_go(self, store: Store) -> None:
        job = Job(store)
        for boundary in range(1, 8):
            job.save(boundary)
        job.run(Home("home", keep_versions=3).trim(job.catalogue))
        assert [each.name for each in store.list(CATALOGUE)] == [
            f"{number:09d}-{RUN}" for number in (7, 8, 9)
        ]

    def test_a_damaged_version_stops_a_start_and_recover_makes_another(self, store: Store) -> None:
        job = Job(store)
        for boundary in (1, 2, 3):
            job.save(boundary)
        store.replace(version_path(5, RUN), b"{}")
        with pytest.raises(DamagedError, match="Version 5 .*flashckpt recover"):
            Job(store)
        made = job.run(HOME.rebuild(nonce()))
        assert (made.version, made.ended) == (6, True)
        assert boundaries(made) == [2, 3]
        after = Job(store)
        assert parent_of(after.catalogue) == SnapshotId(job.name, 3)
        after.save(9)
        assert faults(store) == []

    def test_a_copy_of_another_version_is_damage(self, store: Store) -> None:
        job = Job(store)
        job.save(1)
        store.create(version_path(4, RUN), store.read(version_path(3, RUN), 1 << 20))
        with pytest.raises(DamagedError, match="copy of another version"):
            Job(store)

    def test_data_without_a_catalogue_is_no_fresh_run(self, store: Store) -> None:
        job = Job(store)
        for boundary in (1, 2):
            job.save(boundary)
        store.remove_files(files_of(store, CATALOGUE))
        with pytest.raises(UnusableRunError, match="flashckpt recover"):
            Job(store)
        made = job.run(HOME.rebuild(nonce()))
        assert boundaries(made) == [1, 2]
        assert made.foreign == {job.name}
        assert parent_of(Job(store).catalogue) == SnapshotId(job.name, 2)

    def test_another_run_in_its_place(self, store: Store) -> None:
        job = Job(store)
        job.save(1)
        store.remove_files([*files_of(store, CATALOGUE), *files_of(store, "data")])
        other = Stores({"home": store})
        begun = other.run(start_in(HOME, "0" * 16, nonce()))
        other.run(HOME.update(partial(end, writer=begun.writer)))
        with pytest.raises(RunError, match="was deleted, or was replaced"):
            job.save(2)
