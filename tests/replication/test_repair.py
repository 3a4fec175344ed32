"""A copy that repairs: what is damaged in the target is sent again, and nothing else is touched."""

from contextlib import suppress
from pathlib import Path

import pytest

from flashckpt.commit import lineage
from flashckpt.commit.verification import verify
from flashckpt.commit.view import View
from flashckpt.errors import DamagedError, RunError
from flashckpt.format.names import CommitName
from flashckpt.replication.run_copy import Outcome, StepCopier, copy_run
from flashckpt.store.base import Store
from tests.commit.runs import name_of
from tests.replication.copied import (
    delete,
    files,
    flipped,
    killed_at,
    made,
    named,
    of_step,
    once_at,
    opened,
    visible,
    watch,
)
from tests.replication.copied import near as near
from tests.replication.copied import pair as pair
from tests.replication.copied import tmp_path as tmp_path


def copied(pair: tuple[Store, Store]) -> tuple[Store, Store, CommitName]:
    """A run and its copy, and the older one of their two steps."""
    source, target = pair
    attempt = made(source, [10, 20])
    assert copy_run(source, target, all_steps=True).ok
    return source, target, name_of(10, attempt)


def damaged(folder: Path, name: CommitName, harm: str) -> Path:
    """A file of a copied step, harmed. Which, and how, the words say: of constants and of shards each."""
    file, how = harm.split()
    path = named(folder, file, name.id)[0]
    path.write_bytes(flipped(path.read_bytes()) if how == "flipped" else path.read_bytes()[:-9])
    return path


DAMAGE = ["rank-00001 flipped", "rank-00000 cut", "frozen- flipped", "node-00001 flipped",
          "manifest- flipped", "manifest- cut"]  # fmt: skip


@pytest.mark.parametrize("harm", DAMAGE)
def test_what_is_damaged_in_the_target_is_sent_again(
    pair: tuple[Store, Store], tmp_path: Path, harm: str
) -> None:
    source, target, name = copied(pair)
    path = damaged(tmp_path / "target", name, harm)
    lineage.quarantine(target, name, "there", "read wrongly")
    found = path.read_bytes()
    with suppress(DamagedError):
        StepCopier(source, target).copy(name)
    assert path.read_bytes() == found, "nobody asked for it"

    done = StepCopier(source, target, repairs=True).copy(name)
    assert done.outcome is Outcome.REPAIRED
    assert done.sent_bytes < done.num_bytes
    assert of_step(tmp_path / "target") == of_step(tmp_path / "source")
    assert not View.of(target).damaged
    assert verify(target).ok
    again = StepCopier(source, target, repairs=True).copy(name)
    assert (again.outcome, again.sent_bytes) == (Outcome.THERE, 0)
    assert not [name for name in files(tmp_path / "target") if name.endswith(".tmp")]


def test_a_manifest_is_made_anew_beside_files_that_are_cut_short(
    near: tuple[Store, Store], tmp_path: Path
) -> None:
    """It names their lengths: those of the parts, and not those that are there."""
    source, target, name = copied(near)
    for harm in ("rank-00000 cut", "frozen- cut", "manifest- flipped"):
        damaged(tmp_path / "target", name, harm)
    done = StepCopier(source, target, repairs=True).copy(name)
    assert done.outcome is Outcome.REPAIRED
    assert of_step(tmp_path / "target") == of_step(tmp_path / "source")
    assert verify(target).ok


def test_a_repair_harms_nothing_where_the_source_is_damaged_too(
    near: tuple[Store, Store], tmp_path: Path
) -> None:
    source, target, name = copied(near)
    for store in ("source", "target"):
        damaged(tmp_path / store, name, "rank-00001 flipped")
    before = files(tmp_path / "target")
    with pytest.raises(DamagedError, match="rank-00001"):
        StepCopier(source, target, repairs=True).copy(name)
    assert files(tmp_path / "target") == before


def test_of_two_repairs_of_one_file_the_slower_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = opened("local", tmp_path / "source"), opened("local", tmp_path / "target")
    source, target, name = copied(stores)
    damaged(tmp_path / "target", name, "rank-00001 flipped")
    remove = target.remove

    def removed(path: str) -> None:
        monkeypatch.undo()
        remove(path)
        StepCopier(source, target, repairs=True).copy(name)

    monkeypatch.setattr(target, "remove", removed)
    with pytest.raises(RunError, match="another copy repairs step 10 there at this moment"):
        StepCopier(source, target, repairs=True).copy(name)
    assert of_step(tmp_path / "target") == of_step(tmp_path / "source")
    assert verify(target).ok


@pytest.mark.parametrize("point", ["copy.written", "manifest.creating"])
def test_a_step_that_is_deleted_while_it_is_repaired_stays_deleted(
    near: tuple[Store, Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    source, target, name = copied(near)
    for harm in ("rank-00001 flipped", "manifest- flipped"):
        damaged(tmp_path / "target", name, harm)
    watch(target, monkeypatch, once_at(point, lambda: delete(target, name)))
    with suppress(DamagedError, RunError, OSError):
        StepCopier(source, target, repairs=True).copy(name)
    assert visible(target) == [20]
    assert verify(target).ok


@pytest.mark.process
@pytest.mark.parametrize("point", ["copy.written", "manifest.created"])
def test_a_repair_that_is_killed_is_done_again(
    near: tuple[Store, Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    source, target, name = copied(near)
    for harm in ("rank-00001 flipped", "manifest- flipped"):
        damaged(tmp_path / "target", name, harm)
    copier = StepCopier(source, target, repairs=True)
    killed_at(point, target, monkeypatch, lambda: copier.copy(name))
    assert 20 in visible(target)
    assert verify(target, 20).ok
    StepCopier(source, target, repairs=True).copy(name)
    assert of_step(tmp_path / "target") == of_step(tmp_path / "source")
    assert verify(target).ok
