"""A copy that repairs: what is damaged in the target is sent again, and nothing else is touched."""

from __future__ import annotations

import errno
import os
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import pytest

from flashckpt import crashpoints
from flashckpt.commit import lineage, retention
from flashckpt.commit import steps as steps_module
from flashckpt.commit.verification import verify
from flashckpt.errors import DamagedError, RunError
from flashckpt.format.names import (
    AttemptName,
    buried_path,
    constants_name,
    manifest_path,
)
from flashckpt.format.records import Buried, Part, Tombstone
from flashckpt.store.base import Store
from flashckpt.store.local import LocalStore
from flashckpt.tiers.run_copy import copy_run
from flashckpt.tiers.step_copy import Outcome, StepCopier
from tests.commit import runs
from tests.tiers.copied import add, files, flipped, made, of_step
from tests.tiers.copied import near as near
from tests.tiers.copied import pair as pair
from tests.tiers.copied import tmp_path as tmp_path


def damaged(folder: Path, harm: str) -> Path:
    """A file of a copied step, harmed. Which, and how, the words say: of constants and of shards each."""
    file, how = harm.split()
    path = next(each for each in sorted(folder.rglob("*")) if f"/{file}" in unquote(str(each)))
    path.write_bytes(flipped(path.read_bytes()) if how == "flipped" else path.read_bytes()[:-9])
    return path


DAMAGE = ["shard-00001 flipped", "shard-00000 cut", "constants-00001 flipped", "part-00001 flipped",
          "manifest flipped", "manifest cut"]  # fmt: skip


@pytest.mark.parametrize("harm", DAMAGE)
def test_what_is_damaged_in_the_target_is_sent_again(
    pair: tuple[Store, Store], tmp_path: Path, harm: str
) -> None:
    source, target = pair
    attempt = made(source, [10, 20])
    copy_run(source, target, all_steps=True)
    lineage.mark(target, 10, attempt, "there", "read wrongly")
    path = damaged(tmp_path / "target", harm)
    found = path.read_bytes()
    with suppress(DamagedError, RunError):
        StepCopier(source, target).copy(10, attempt)
    assert path.read_bytes() == found, "nobody asked for it"

    done = StepCopier(source, target, repairs=True).copy(10, attempt)
    assert done.outcome is Outcome.REPAIRED
    assert done.sent_bytes < done.num_bytes
    names = {name: data for name, data in of_step(tmp_path / "target").items() if "mark-" not in name}
    assert names == of_step(tmp_path / "source")
    assert not lineage.is_marked(target, lineage.VisibleStep(10, attempt))
    assert verify(target).ok
    again = StepCopier(source, target, repairs=True).copy(10, attempt)
    assert (again.outcome, again.sent_bytes) == (Outcome.THERE, 0)
    assert not [name for name in files(tmp_path / "target") if name.endswith(".tmp")]


def test_a_repair_harms_nothing_where_the_source_is_damaged_too(
    pair: tuple[Store, Store], tmp_path: Path
) -> None:
    source, target = pair
    attempt = made(source, [10, 20])
    copy_run(source, target, all_steps=True)
    for store in ("source", "target"):
        damaged(tmp_path / store, "shard-00001 flipped")
    before = files(tmp_path / "target")
    with pytest.raises(DamagedError, match="shard-00001"):
        StepCopier(source, target, repairs=True).copy(10, attempt)
    assert files(tmp_path / "target") == before


def test_a_repair_takes_no_other_step_for_damage(near: tuple[Store, Store], tmp_path: Path) -> None:
    source, target = near
    attempt = made(source, [10])
    copy_run(source, target)
    [part] = (each for each in (tmp_path / "target").rglob("*") if "part-00001" in unquote(str(each)))
    whole = Part.from_bytes(part.read_bytes(), "part")
    part.write_bytes(replace(whole, environment={"torch": "another"}).to_bytes())
    before = files(tmp_path / "target")
    for repairs in (False, True):
        with pytest.raises(RunError, match="another file.*Copy to a place of its own") as told:
            StepCopier(source, target, repairs=repairs).copy(10, attempt)
        assert "--repair" not in str(told.value), "it would do nothing"
    assert files(tmp_path / "target") == before


def test_a_repair_that_finds_no_room_takes_nothing_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a damaged shard one tensor may be bad, and all others be read by hand."""
    source, target = (LocalStore(str(tmp_path / name)) for name in ("source", "target"))
    attempt = made(source, [10, 20])
    copy_run(source, target, all_steps=True)
    damaged(tmp_path / "target", "shard-00001 flipped")
    before = files(tmp_path / "target")

    def full(*args: object, **how: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(target, "write_shard", full)
    with pytest.raises(OSError, match="No space"):
        StepCopier(source, target, repairs=True).copy(10, attempt)
    assert files(tmp_path / "target") == before


@pytest.mark.parametrize("harm", ["shard-00001 flipped", "manifest flipped"])
def test_a_step_that_is_deleted_while_it_is_repaired_stays_deleted(
    pair: tuple[Store, Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    source, target = pair
    attempt = made(source, [10, 20])
    copy_run(source, target, all_steps=True)
    damaged(tmp_path / "target", harm)

    path, stone = manifest_path(10, attempt), Tombstone(step=10, attempt=attempt)

    def begin(name: str) -> None:
        if name == "copy.records":
            target.replace(path, stone.to_bytes())  # and its files go next

    monkeypatch.setattr(crashpoints, "point", begin)
    assert StepCopier(source, target, repairs=True).copy(10, attempt).outcome is Outcome.BURIED
    assert steps_module.read_manifest(target, 10, attempt) == stone
    assert [each.step for each in lineage.visible(target)] == [20]


def test_a_repair_takes_no_constants_from_another_step(
    pair: tuple[Store, Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the source a number has come again, as in runs of older versions: other bytes under one name."""
    source, target = pair
    attempt = made(source, [10])
    copy_run(source, target)
    retention.bury(source, 10, attempt)
    for path in (tmp_path / "source").rglob("constants-*"):
        path.unlink()
    of = runs.contents_of
    monkeypatch.setattr(
        runs, "contents_of", lambda file, leaves: of(file, {n: a + 1 for n, a in leaves.items()})
    )
    add(source, 20, attempt)
    before = files(tmp_path / "target")
    assert verify(target).ok
    for repairs in (False, True):
        with pytest.raises(RunError, match="another file.*Copy to a place of its own") as told:
            StepCopier(source, target, repairs=repairs).copy(20, attempt)
        assert "--repair" not in str(told.value), "it would do nothing"
    assert [each.step for each in lineage.visible(target)] == [10]
    assert verify(target).ok
    assert all(data == before[name] for name, data in files(tmp_path / "target").items() if name in before)


@pytest.mark.parametrize("harm", ["shard-00001 flipped", "shard-00000 cut", "constants-00001 flipped"])
def test_a_repair_minds_no_record_of_who_was_killed_removing_what_the_step_names(
    pair: tuple[Store, Store], tmp_path: Path, harm: str
) -> None:
    """He looks once more before he removes anything, and finds the manifest."""
    source, target = pair
    attempt = made(source, [10, 20])
    copy_run(source, target, all_steps=True)
    buried(target, attempt)
    damaged(tmp_path / "target", harm)
    assert StepCopier(source, target, repairs=True).copy(10, attempt).outcome is Outcome.REPAIRED
    assert verify(target).ok
    assert [each.step for each in lineage.visible(target)] == [10, 20]


def buried(store: Store, attempt: AttemptName) -> str:
    """The record of who is about to remove constants of both ranks."""
    record = buried_path(attempt, "0123abcd")
    names = tuple(constants_name(rank, 1) for rank in (0, 1))
    assert store.create(record, Buried(attempt=attempt, files=names).to_bytes())
    return record


def test_a_repair_says_what_keeps_it_from_the_manifest(pair: tuple[Store, Store], tmp_path: Path) -> None:
    """Without one nobody can tell whether he has looked already, and removes what it names."""
    source, target = pair
    attempt = made(source, [10])
    copy_run(source, target)
    record = buried(target, attempt)
    damaged(tmp_path / "target", "manifest flipped")
    with pytest.raises(DamagedError, match=f"step 10 is not committed.*{record}.*delete that record"):
        StepCopier(source, target, repairs=True).copy(10, attempt)
    target.remove(record)
    assert StepCopier(source, target, repairs=True).copy(10, attempt).outcome is Outcome.REPAIRED
    assert verify(target).ok


@pytest.mark.process
@pytest.mark.parametrize("point", ["copy.written", "copy.records"])
def test_a_repair_that_is_killed_is_done_again(pair: tuple[Store, Store], tmp_path: Path, point: str) -> None:
    source, target = pair
    attempt = made(source, [10, 20])
    copy_run(source, target, all_steps=True)
    damaged(tmp_path / "target", "shard-00001 flipped")
    if point == "copy.written" and not target.capabilities.rename:
        return  # an object has its name at once
    child = os.fork()
    if not child:
        crashpoints.arm(f"{point}:1")
        StepCopier(source, target, repairs=True).copy(10, attempt)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert 20 in [each.step for each in lineage.visible(target)]
    assert verify(target, 20).ok
    StepCopier(source, target, repairs=True).copy(10, attempt)
    assert of_step(tmp_path / "target") == of_step(tmp_path / "source")
    assert verify(target).ok
