"""Constants that a step has in the folder of an older attempt: found again, and there as long as a step names
them, in whatever order those who name and those who delete come, and wherever they are killed."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import cast

import pytest

import flashckpt
from flashckpt.commit import constants, steps
from flashckpt.commit.attempts import attempts
from flashckpt.commit.constants_files import check_records_of_buried
from flashckpt.commit.retention import prune, sweep_dead
from flashckpt.commit.steps import Committed, commit, missing_files, publish_part, read_manifest, read_step
from flashckpt.commit.verification import verify
from flashckpt.errors import DamagedError
from flashckpt.format.names import (
    RUN,
    AttemptName,
    attempt_folder,
    buried_path,
    constants_name,
    constants_path,
    step_attempt_folder,
)
from flashckpt.format.records import Buried, Manifest, Part, PartHead, Run
from flashckpt.options import Keep
from flashckpt.persist.deletions import Unused, is_unused_still, unused_files
from flashckpt.persist.job import SealedSnapshot
from flashckpt.persist.writer import _ConstantsShards
from flashckpt.store.base import Store
from flashckpt.store.local import LocalStore
from flashckpt.store.objects import ObjectStore
from flashckpt.tiers.step_copy import Outcome, StepCopier
from tests.commit import runs
from tests.commit.in_turn import Killed, ObjectsInTurn, SystemInTurn, Turns
from tests.commit.runs import attempt_at, is_whole, new_run, part_of, publish

FILE = constants_name(0, 1)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return new_run(tmp_path / "run")


def two_attempts(store: Store) -> tuple[AttemptName, AttemptName, Part]:
    """The part is of the second, and names the constants of the first."""
    first = attempt_at(store)
    runs.commit(store, 100, first, constants=True)
    second = attempt_at(store, first, 100)
    return first, second, publish(store, 200, second, constants=True)


def test_what_names_an_older_attempts_constants_is_of_the_fourth_format(store: LocalStore) -> None:
    first, second, part = two_attempts(store)
    assert commit(store, 200, second, 1)
    assert part.ranks[0].constants is not None
    assert part.ranks[0].constants.shard.file == f"{first}/{FILE}"
    manifest = read_manifest(store, 200, second)
    assert isinstance(manifest, Manifest)
    assert manifest.format == 4
    assert manifest.to_bytes().startswith(part.to_bytes()[:11])
    assert Part.from_bytes(part.to_bytes(), "part") == part
    assert PartHead.from_prefix(part.to_bytes(), "part") == part.head()
    record = read_step(store, 200, second)
    assert record.constants_path(0) == f"{attempt_folder(first)}/{FILE}"
    assert is_whole(store, 200, second)
    rows = verify(store).rows
    assert [row.file for row in rows if "constants" in row.file] == [record.constants_path(0)], "read once"
    assert all(row.status == "ok" for row in rows)
    first_manifest = read_manifest(store, 100, first)
    assert isinstance(first_manifest, Manifest)
    assert first_manifest.format == 2


@pytest.mark.parametrize("owner", ["its own", "newer", "none"])
def test_a_name_that_leads_to_no_older_attempt_is_refused(store: LocalStore, owner: str) -> None:
    _, second, part = two_attempts(store)
    names = {"its own": str(second), "newer": "000007-0123abcd", "none": "0000001-0123abcd"}
    mine = part.ranks[0].constants
    assert mine is not None
    name = f"{names[owner]}/{FILE}"
    rank = replace(part.ranks[0], constants=replace(mine, shard=replace(mine.shard, file=name)))
    data = replace(part, ranks=(rank,)).to_bytes()
    with pytest.raises(DamagedError, match="no constants shard|no such name"):
        Part.from_bytes(data, "part")
    with pytest.raises(DamagedError, match="no constants shard|no such name"):
        PartHead.from_prefix(data, "part")
    assert commit(store, 200, second, 1)
    manifest = read_manifest(store, 200, second)
    assert isinstance(manifest, Manifest)
    wrong = replace(manifest, constants=(manifest.constants[0]._replace(file=name),))
    with pytest.raises(DamagedError, match="no constants shard|no such name"):
        Manifest.from_bytes(wrong.to_bytes(), "manifest")


def test_recovery_takes_no_named_constants_of_an_attempt_without_steps(store: LocalStore) -> None:
    first, second, _ = two_attempts(store)
    store.remove_tree(step_attempt_folder(100, first))
    other = f"{attempt_folder(first)}/{constants_name(0, 2)}"
    Path(store.local_path(other)).write_bytes(b"half")
    assert [each.path for each in unused_files(store)] == [other]
    named = Unused(path=f"{attempt_folder(first)}/{FILE}", attempt=first)
    assert not is_unused_still(store, named)
    assert commit(store, 200, second, 1)
    path = Path(store.local_path(f"{step_attempt_folder(200, second)}/part-00000.json"))
    path.write_bytes(path.read_bytes()[:-9])
    assert unused_files(store) == [], "who cannot be read may name any that is older"
    assert sweep_dead(store) == []


def test_who_is_killed_while_he_removes_constants_keeps_nobody_from_committing(store: LocalStore) -> None:
    """His record stands: what it names is named by nobody any more, and written anew."""
    first = attempt_at(store)
    runs.commit(store, 100, first, constants=True)
    record = Buried(attempt=first, files=(FILE,))
    assert store.create(buried_path(first, "0123abcd"), record.to_bytes())
    second = attempt_at(store, first, 100)
    part = publish(store, 200, second, constants=True)
    assert commit(store, 200, second, 1)
    assert part.ranks[0].constants is not None
    assert part.ranks[0].constants.shard.file == FILE, "of its own"
    assert is_whole(store, 100, first)


class BadSector(LocalStore):
    """Its disk gives no record of buried constants any more."""

    def read(self, path: str, max_bytes: int) -> bytes:
        if "/buried-" in path:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return super().read(path, max_bytes)


@pytest.mark.parametrize("kind", [LocalStore, BadSector], ids=["rotten", "bad sector"])
def test_a_record_that_cannot_be_read_stops_only_what_may_be_in_it(
    tmp_path: Path, kind: type[LocalStore]
) -> None:
    attempt = attempt_at(new_run(tmp_path / "run"))
    store = kind(str(tmp_path / "run"))
    assert runs.commit(store, 100, attempt, constants=True)
    record = buried_path(attempt, "0123abcd")
    assert store.create(record, b"rot")
    assert runs.commit(store, 200, attempt, constants=True), "a committed step names the same"
    part = part_of(store, 300, attempt, constants=True)
    [rank], other = part.ranks, constants_name(0, 2)
    assert rank.constants is not None
    folder = Path(store.local_path(attempt_folder(attempt)))
    (folder / other).write_bytes((folder / FILE).read_bytes())
    shard = replace(rank.constants.shard, file=other)
    publish_part(store, replace(part, ranks=(replace(rank, constants=replace(rank.constants, shard=shard)),)))
    with pytest.raises(DamagedError, match=f"{record}.* cannot be read.*saved as ever.*Delete that file"):
        commit(store, 300, attempt, 1)
    with pytest.raises(DamagedError, match=f"Constants cannot be written: {record}"):
        check_records_of_buried(store, attempt)
    # Whoever wrote it has gone on within a day, or never will.
    os.utime(store.local_path(record), (0, time.time() - 90_000))
    assert commit(store, 300, attempt, 1)


def test_what_has_come_again_under_a_name_that_a_part_gives_is_never_read(store: LocalStore) -> None:
    """A keeper decides, and sleeps; others remove the file, and write one of the same length."""
    attempt = attempt_at(store)
    runs.commit(store, 100, attempt)
    part = part_of(store, 200, attempt, constants=True)
    path = f"{attempt_folder(attempt)}/{FILE}"
    assert constants.remove(store, attempt, [FILE])
    assert part.ranks[0].constants is not None
    layout = part.ranks[0].constants.layout()
    runs.write_shard(store, path, layout.header + b"\1" * (layout.num_bytes - layout.data_start), layout)
    publish_part(store, part)
    assert commit(store, 200, attempt, 1), "names and lengths are right"
    report = verify(store, 200)
    assert [row.file for row in report.rows if row.status != "ok"] == [path]
    with pytest.raises(DamagedError, match="frozen"):
        flashckpt.load(store.url, 200)
    with pytest.raises(DamagedError, match="frozen"):
        StepCopier(store, new_run(Path(store.url).parent / "other")).copy(200, attempt)
    assert flashckpt.load(store.url, 100)


# ---- one names what another removes


class Scene:
    """The second attempt has committed steps that name no constants, and the first has none left. A keeper of
    the second has decided long ago that step 200 names the first's constants, and slept."""

    def __init__(self, opened: Callable[[Turns], Store]) -> None:
        self.opened, store = opened, opened(Turns())
        store.create("run.json", Run(run_id="0" * 16).to_bytes())
        self.first = attempt_at(store)
        runs.commit(store, 100, self.first, constants=True)
        self.second = attempt_at(store, self.first, 100)
        self.part = part_of(store, 200, self.second, constants=True)
        for step in (300, 400):
            runs.commit(store, step, self.second)
        store.remove_tree(step_attempt_folder(100, self.first))

    def names(self, store: Store) -> Committed:
        publish_part(store, self.part)
        return commit(store, 200, self.second, 1)

    def deletes(self, store: Store) -> object:
        return prune(store, self.second, Keep(last=3))

    def both(self, turns: Turns) -> tuple[Store, object, object]:
        """The run as it is then, and what each has returned or raised. Each has a store of his own."""
        self.reset()
        one, other = self.opened(turns), self.opened(turns)
        told, deleted = turns.run(lambda: self.names(one), lambda: self.deletes(other))
        return self.opened(Turns()), told, deleted

    def reset(self) -> None:
        raise NotImplementedError

    def check(self, store: Store, told: object = None) -> None:
        """Whatever a manifest names is there; and who was told that it is committed has one."""
        found = read_manifest(store, 200, self.second)
        if isinstance(found, Manifest):
            assert missing_files(store, found) == []
            assert verify(store, all_steps=True).ok
        assert told is not Committed.YES or isinstance(found, Manifest)
        assert found is None or store.exists(constants_path(self.second, f"{self.first}/{FILE}"))


class LocalScene(Scene):
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        super().__init__(lambda turns: LocalStore(str(folder / "run"), SystemInTurn(turns)))
        shutil.copytree(folder / "run", folder / "made")

    def reset(self) -> None:
        shutil.rmtree(self._folder / "run")
        shutil.copytree(self._folder / "made", self._folder / "run")


class ObjectScene(Scene):
    def __init__(self, folder: Path) -> None:
        self._held = dict[str, bytes]()
        super().__init__(lambda turns: ObjectStore(ObjectsInTurn(turns, self._held)))
        self._made = dict(self._held)

    def reset(self) -> None:
        self._held = dict(self._made)


@pytest.fixture(params=[LocalScene, ObjectScene], ids=["local", "objects"])
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Scene:
    made: Scene = request.param(tmp_path)
    return made


def orders(calls: list[int], chance: Random) -> Iterator[list[int]]:
    """Each of them whole before each call of the other; and some in any order."""
    for number in (0, 1):
        for before in range(calls[number] + 1):
            yield [number] * before + [1 - number] * 999
    for _ in range(60):
        yield [chance.choice([0, 1]) for _ in range(sum(calls))]


@pytest.mark.parametrize("rots", [False, True], ids=["", "its record rots at once"])
def test_no_order_of_naming_and_removing_leaves_a_step_without_its_constants(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, rots: bool
) -> None:
    if rots:
        monkeypatch.setattr(Buried, "to_bytes", lambda self: b"rot")
    ends, calls = set(), [0, 0]
    for first in (0, 1):
        turns = Turns([first] * 999)
        scene.both(turns)
        calls = [max(pair) for pair in zip(calls, turns.calls, strict=True)]
    for order in orders(calls, Random(7)):
        turns = Turns(order)
        store, told, deleted = scene.both(turns)
        assert not isinstance(deleted, BaseException), deleted
        assert told is Committed.YES or isinstance(told, DamagedError), told
        scene.check(store, told)
        if told is not Committed.YES and store.exists(f"{attempt_folder(scene.first)}/{FILE}"):
            told = commit(store, 200, scene.second, 1)
            assert told is Committed.YES, "what stays after all is named by nobody's record"
        ends.add((told is Committed.YES, scene.first in [info.name for info in attempts(store)]))
    assert ends == {(True, True), (False, False)}


def test_a_record_that_rots_stops_nobody_who_names_what_a_committed_step_names(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer finds that it is named, and leaves it."""

    def removes(store: Store) -> object:
        return constants.remove(store, scene.first, [FILE])

    def reset() -> None:
        emptied()
        plain = scene.opened(Turns())
        part = part_of(plain, 500, scene.second)
        rank = replace(part.ranks[0], constants=scene.part.ranks[0].constants)
        publish_part(plain, replace(part, ranks=(rank,)))
        assert commit(plain, 500, scene.second, 1)

    monkeypatch.setattr(Buried, "to_bytes", lambda self: b"rot")
    emptied = scene.reset
    scene.reset, scene.deletes = reset, removes  # type: ignore[method-assign]
    for before in range(0, 30, 2):
        store, told, deleted = scene.both(Turns([0] * before + [1] * 999))
        scene.check(store, told)
        assert (told, deleted) == (Committed.YES, False)
        store, told, deleted = scene.both(Turns([1] * before + [0] * 999))
        scene.check(store, told)
        assert (told, deleted) == (Committed.YES, False)


@pytest.mark.parametrize("who", [0, 1], ids=["names", "deletes"])
def test_killed_at_any_call(scene: Scene, who: int) -> None:
    """Then the other comes; and then another one who deletes."""
    for at in range(999):
        turns = Turns([who] * 999, killed=(who, at))
        store, told, deleted = scene.both(turns)
        scene.check(store, told)
        if not isinstance((told, deleted)[who], Killed):
            break
        scene.deletes(store)
        scene.check(store, told)
        attempt = attempt_at(store, scene.second, 400)
        assert runs.commit(store, 500, attempt, constants=True)
        assert is_whole(store, 500, attempt)
    assert at > 3


@dataclass
class Pinned:
    rank: int = 0

    def holds(self) -> bool:
        return True


def test_a_keeper_of_the_first_that_wakes_up_makes_no_room_of_what_the_second_names(scene: Scene) -> None:
    """One that was stopped while it looked, and thinks that nobody else names constants of its attempt."""

    def clears(store: Store) -> None:
        _ConstantsShards(store, 1, 0)._clear(scene.first, cast(SealedSnapshot, Pinned()))

    scene.deletes = clears  # type: ignore[method-assign]
    for before in range(99):
        turns = Turns([1] * before + [0] * 999)
        store, told, _ = scene.both(turns)
        scene.check(store, told)
        if turns.calls[1] < before:
            break
    assert before > 3


def test_constants_make_room_on_a_disk_that_is_full_to_the_last_byte(small_disk: Path) -> None:
    store = new_run(small_disk / "run")
    attempt = attempt_at(store)
    assert runs.commit(store, 100, attempt, constants=True)
    folder = Path(store.local_path(attempt_folder(attempt)))
    (folder / constants_name(0, 2)).write_bytes(bytes(1 << 20))
    with open(small_disk / "filler", "wb", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(bytes(4096))
    _ConstantsShards(store, 1, 0)._clear(attempt, cast(SealedSnapshot, Pinned()))
    assert constants.files_of(store, attempt) == [FILE], "that which a step names"
    assert constants.fresh_name(store, attempt, 0) == constants_name(0, 3)
    assert runs.commit(store, 200, attempt, constants=True)
    assert is_whole(store, 200, attempt)


def test_what_stands_for_a_record_is_as_old_as_its_name(store: LocalStore) -> None:
    """Not as run.json, which it is a link of: whoever removes has just begun."""
    attempt = attempt_at(store)
    os.utime(store.local_path(RUN), (0, time.time() - 1_000_000))
    record = buried_path(attempt, "0123abcd")
    assert store.copy(RUN, record)
    publish(store, 100, attempt, constants=True)
    with pytest.raises(DamagedError, match=f"{record}.* cannot be read.*Delete that file"):
        commit(store, 100, attempt, 1)
    second = attempt_at(store, None, 0)
    assert commit(store, 100, second, 1) is Committed.WAITING
    store.remove_tree(step_attempt_folder(100, attempt))
    sweep_dead(store)
    assert store.exists(record), "he may be about to go on"
    store.remove(record)


class CopyScene:
    """A target that has all of a run but the first's step, which somebody copies there by hand, while another
    deletes what older attempts have left. `has_constants`: those of that step are there."""

    def __init__(self, *, has_constants: bool) -> None:
        held = dict[str, bytes]()
        self._source = store = ObjectStore(ObjectsInTurn(Turns(), held))
        store.create("run.json", Run(run_id="0" * 16).to_bytes())
        self.first = attempt_at(store)
        runs.commit(store, 100, self.first, constants=True)
        self.second = attempt_at(store, self.first, 100)
        for step in (300, 400):
            runs.commit(store, step, self.second)
        gone = step_attempt_folder(100, self.first)
        self._made = {key: data for key, data in held.items() if not key.startswith(gone)}
        if not has_constants:
            self._made.pop(f"{attempt_folder(self.first)}/{FILE}")

    def copies(self, store: Store) -> Outcome:
        return StepCopier(self._source, store).copy(100, self.first).outcome

    def deletes(self, store: Store) -> object:
        return prune(store, self.second, Keep(last=3))

    def check(self, turns: Turns, *deeds: Callable[[Store], object]) -> set[object]:
        """What they return or raise. A step that is committed then is whole."""
        held = dict(self._made)
        stores = [ObjectStore(ObjectsInTurn(turns, held)) for _ in deeds]
        told = turns.run(*(partial(deed, store) for deed, store in zip(deeds, stores, strict=True)))
        store = ObjectStore(ObjectsInTurn(Turns(), held))
        found = read_manifest(store, 100, self.first)
        assert not isinstance(found, Manifest) or missing_files(store, found) == []
        return {each if isinstance(each, Outcome) else type(each) for each in told}


def test_no_sweep_takes_what_was_copied_after_its_look() -> None:
    scene = CopyScene(has_constants=False)
    ends = set[object]()
    for before in range(40):
        ends |= scene.check(Turns([1] * before + [0] * 999), scene.copies, scene.deletes)
    assert Outcome.COPIED in ends


def test_who_is_stopped_just_before_he_removes_takes_nothing_that_came_again() -> None:
    """Another has removed it meanwhile, and a copier has sent it once more."""
    scene = CopyScene(has_constants=True)

    def removes(store: Store) -> object:
        return constants.remove(store, scene.first, [FILE])

    def deletes_and_copies(store: Store) -> object:
        scene.deletes(store)
        return scene.copies(store)

    ends = set[object]()
    for before in range(20):
        ends |= scene.check(Turns([0] * before + [1] * 999), removes, deletes_and_copies)
    assert {Outcome.COPIED, DamagedError} <= ends


def test_the_name_of_a_file_that_was_to_go_is_not_used_again(store: LocalStore) -> None:
    """Whoever removed it was killed before he removed his record: a step that names it is never committed."""
    attempt = attempt_at(store)
    record = Buried(attempt=attempt, files=(FILE,))
    assert store.create(buried_path(attempt, "0123abcd"), record.to_bytes())
    assert constants.fresh_name(store, attempt, 0) == constants_name(0, 2)


def test_the_test_sees_a_committer_that_does_not_look(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "buried_constants", lambda *_: [])
    with pytest.raises(AssertionError):
        test_no_order_of_naming_and_removing_leaves_a_step_without_its_constants(scene, monkeypatch, False)


def test_the_test_sees_who_removes_without_a_second_look(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove(store: Store, owner: AttemptName, files: list[str]) -> bool:
        store.remove_files(f"{attempt_folder(owner)}/{file}" for file in files)
        return True

    monkeypatch.setattr(constants, "remove", remove)
    with pytest.raises(AssertionError):
        test_no_order_of_naming_and_removing_leaves_a_step_without_its_constants(scene, monkeypatch, False)
