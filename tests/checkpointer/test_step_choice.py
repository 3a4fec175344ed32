"""Which step a real run goes on from, and what stops it from going on from an older one."""

import contextlib
import errno
import logging
import os
import random
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import flashckpt
from flashckpt.checkpointer.resume import attach_to
from flashckpt.checkpointer.session import open_session
from flashckpt.options import Environment
from flashckpt.recovery.recover import recover
from flashckpt.restore import step_choice
from flashckpt.restore.snapshot import Snapshot
from flashckpt.state.tree import Tree
from flashckpt.store import open_store
from flashckpt.store.local import LocalStore
from tests import run_view
from tests.checkpointer.damaged import committed, newest, quarantined, trained
from tests.checkpointer.test_loop import Job
from tests.checkpointer.voting import Voting, saving_by_hand
from tests.commit.runs import of_format
from tests.keeper.driver import told

pytestmark = pytest.mark.usefixtures("runtime")


def rewrite_part(run: Path, change: Callable[[bytes], bytes]) -> None:
    """Another part for the newest step, which its manifest lists with the right length."""
    record = newest(run)
    [row] = record.manifest.parts
    path = run / record.part_path(0)
    data = change(path.read_bytes())
    path.write_bytes(data)
    parts = (row._replace(num_bytes=len(data)),)
    run_view.relist(open_store(run), replace(record.manifest, parts=parts))


def assert_refused(run: Path, error: type[flashckpt.FlashckptError], match: str) -> None:
    """attach stops with this error, and changes, quarantines and starts nothing."""
    job, versions = Job(), set(run.glob("catalogue/*"))
    weight, numbers = job.model.weight.detach().clone(), (random.getstate(), torch.get_rng_state())
    with pytest.raises(error, match=match):
        flashckpt.attach(run, **job.named)
    assert torch.equal(job.model.weight, weight)
    assert random.getstate() == numbers[0]
    assert torch.equal(torch.get_rng_state(), numbers[1])
    assert not quarantined(run)
    assert set(run.glob("catalogue/*")) == versions


def resumed_at(run: Path) -> int:
    with flashckpt.attach(run, **Job().named) as checkpointer:
        return checkpointer.completed


@pytest.mark.every_set
@pytest.mark.parametrize("lost", [("catalogue", "alive", "events"), ("catalogue", "data/*/*/manifest-*")])
def test_shards_without_their_catalogue_are_no_fresh_run_and_recover_gets_back_what_it_can(
    run: Path, lost: tuple[str, ...]
) -> None:
    for path in [path for pattern in lost for path in run.glob(pattern)]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shards = set(run.glob("data/*/*/*.safetensors"))
    assert_refused(run, flashckpt.UnusableRunError, "flashckpt recover")
    if any("data" in each for each in lost):
        with pytest.raises(flashckpt.UnusableRunError, match="none is whole"):
            recover(open_store(run))
        assert_refused(run, flashckpt.UnusableRunError, "flashckpt recover")
    else:
        assert recover(open_store(run)).resume_problem == ""
        assert flashckpt.steps(run) == [2, 4]
        assert resumed_at(run) == 4
    assert shards <= set(run.glob("data/*/*/*.safetensors"))


def test_a_mark_of_damage_rolls_nothing_back(run: Path) -> None:
    """The bytes are verified at each start."""
    run_view.mark_damaged(open_store(run), newest(run).name, "some-other-host", "its memory was bad")
    assert resumed_at(run) == 4


class Failing:
    """Storage that answers EIO for the newest step's part, so many times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run: Path, times: int) -> None:
        self.left, self._read, self._folder = times, LocalStore.read, newest(run).folder
        monkeypatch.setattr(LocalStore, "read", lambda *arguments: self.read(*arguments))
        monkeypatch.setattr(step_choice, "_PAUSES_S", (0.0, 0.0, 0.0))

    def read(self, store: LocalStore, path: str, max_bytes: int) -> bytes:
        if self.left and path.startswith(f"{self._folder}/node-"):
            self.left -= 1
            raise OSError(errno.EIO, "Input/output error", path)
        return self._read(store, path, max_bytes)


def test_storage_that_fails_once_costs_no_step(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing(monkeypatch, run, times=1)
    assert resumed_at(run) == 4
    assert not failing.left


def test_storage_that_goes_on_failing_stops_the_resume(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Failing(monkeypatch, run, times=10**6)
    assert_refused(run, flashckpt.RunError, "flashckpt branch")
    monkeypatch.undo()


class FaultyShards:
    """A disk that answers with this errno, so many times, for the shards of these snapshots."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *records: run_view.Record, times: int = 10**6,
        number: int = errno.EIO, then: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self.left, read = times, LocalStore.read_chunks
        folders = [record.folder for record in records]

        def read_chunks(store: LocalStore, path: str, *arguments: Any, **named: Any) -> None:
            if self.left and path.rpartition("/")[0] in folders:
                self.left -= 1
                then()
                raise OSError(number, os.strerror(number), path)
            read(store, path, *arguments, **named)

        monkeypatch.setattr(LocalStore, "read_chunks", read_chunks)
        monkeypatch.setattr(step_choice, "_PAUSES_S", (0.0, 0.0, 0.0))


def test_a_shard_that_is_read_in_the_end_costs_no_step(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = FaultyShards(monkeypatch, newest(run), times=3)
    assert resumed_at(run) == 4
    assert not faulty.left


def test_a_timeout_of_the_program_ends_a_start_whose_storage_does_not_answer(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`TimeoutError` is an OSError, but no failure of storage, which would be tried again."""
    answers = threading.Event()

    def hang() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
        answers.wait(240)

    def handler(*_: object) -> None:
        raise TimeoutError("of the program")

    FaultyShards(monkeypatch, newest(run), then=hang)
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(TimeoutError, match="of the program"):
            resumed_at(run)
    finally:
        signal.signal(signal.SIGALRM, before)
        answers.set()


def test_a_shard_that_the_disk_does_not_give_leads_to_the_older_step_and_back(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attempt = str(newest(run).attempt)
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "flashckpt"):
        FaultyShards(patch, newest(run))
        job = Job()
        with flashckpt.attach(run, every=None, **job.named) as checkpointer:
            assert checkpointer.completed == 2
            for _ in range(4):  # past the step that was left behind, and past what is kept
                job.train(torch.ones(2, 4))
                checkpointer.step()
                checkpointer.save()
                checkpointer.wait()
    [said] = [each.getMessage() for each in caplog.records if "CANNOT READ" in each.getMessage()]
    assert "Input/output error" in said
    assert f"flashckpt branch {run} 4@{attempt}" in said
    [line] = told(run, "resume", 1)
    assert "step 4" in line["refused"][0]
    assert not quarantined(run)
    flashckpt.branch(run, 4, attempt)
    assert flashckpt.steps(run) == [2, 4] or flashckpt.steps(run) == [4]
    assert resumed_at(run) == 4


def test_a_disk_that_gives_no_shard_at_all_is_no_fresh_start(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FaultyShards(monkeypatch, *committed(run))
    assert_refused(run, flashckpt.UnusableRunError, "Input/output error")


@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.EACCES])
def test_storage_that_is_away_is_no_reason_for_an_older_step(
    run: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    FaultyShards(monkeypatch, newest(run), number=number)
    assert_refused(run, flashckpt.RunError, "flashckpt branch")


def test_a_storage_that_goes_away_as_a_whole_stops_the_resume(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shard is what fails first, and with its last try everything else of the step."""
    tries: list[int] = []

    def then() -> None:
        tries.append(1)
        if len(tries) == step_choice.TRIES:
            Failing(monkeypatch, run, times=10**6)

    FaultyShards(monkeypatch, newest(run), then=then)
    assert_refused(run, flashckpt.RunError, "Start again when the storage answers")
    monkeypatch.undo()


def test_a_step_of_a_newer_format_is_not_left_behind(run: Path) -> None:
    rewrite_part(run, partial(of_format, 9))
    assert_refused(run, flashckpt.FormatError, "written in format 9")


@pytest.mark.parametrize(
    ("section", "value"),
    [("progress", {"step": -1}), ("rng", {"python": "x"}), ("state", {})],
)
def test_values_that_are_damaged_lead_to_the_older_step(run: Path, section: str, value: object) -> None:
    [part] = newest(run).parts
    [rank] = part.ranks
    harmed = replace(part, ranks=(replace(rank, values={**rank.values, section: value}),))
    rewrite_part(run, lambda data: harmed.to_bytes())
    assert resumed_at(run) == 2
    assert len(quarantined(run)) == 1


def test_the_name_that_safetensors_keeps_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(flashckpt.StateError, match="__metadata__"):
        flashckpt.attach(tmp_path / "run", state={"__metadata__": Job().model})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("tier", ["memory", "local"])
def test_what_the_vote_refuses_is_passed_over_and_nothing_live_changes_before_it(
    tmp_path: Path, kill_keepers: Callable[..., None], tier: str
) -> None:
    folder = tmp_path / "run"
    trained(folder, [2, 3])
    with contextlib.suppress(KeyboardInterrupt), flashckpt.attach(folder, every=1, **Job().named) as cut:
        cut.step()
        cut.save()
        cut.wait()
        raise KeyboardInterrupt  # the keeper stays, with what it has in memory
    if tier == "local":
        kill_keepers(remove_regions=True)
    job, asked = Job(), []
    before, boundaries = job.model.weight.detach().clone(), set[int]()

    def vote(reason: str, snapshot: Snapshot | None) -> bool:
        assert not reason
        if snapshot is None:  # its bytes are read
            assert asked[-1][0] == 2
            return True
        assert torch.equal(job.model.weight, before)
        assert not job.optimizer.state
        asked.append((snapshot.step, snapshot.tier))
        boundaries.add(snapshot.boundary)
        return snapshot.step == 2

    options = flashckpt.Options()
    session = open_session(folder, flashckpt.Keep(), options, Environment.read(), group=Voting(vote))
    checkpointer = attach_to(session, Tree(job.named), saving_by_hand(folder), began=0.0)
    with checkpointer:
        assert checkpointer.completed == 2
        assert asked[0] == (4, tier)
        assert {step for step, _ in asked} == {4, 3, 2}
        assert len(boundaries) == 3, "each is another content, from whatever tier"
        job.train(torch.ones(2, 4) * 2)
        checkpointer.step()
        checkpointer.save()
    assert flashckpt.steps(folder)[0] == 2
    assert not quarantined(folder), "a step that another rank could not load is whole here"


def test_where_the_vote_refuses_all_nothing_is_loaded_or_started(run: Path) -> None:
    job, versions = Job(), set(run.glob("catalogue/*"))
    weight, options = job.model.weight.detach().clone(), flashckpt.Options()
    group = Voting(lambda reason, snapshot: False)
    session = open_session(run, flashckpt.Keep(), options, Environment.read(), group=group)
    with pytest.raises(flashckpt.UnusableRunError, match="another rank could not"):
        attach_to(session, Tree(job.named), saving_by_hand(run), began=0.0)
    assert torch.equal(job.model.weight, weight)
    assert set(run.glob("catalogue/*")) == versions
    assert resumed_at(run) == 4


def test_a_step_that_is_damaged_here_is_voted_against(run: Path) -> None:
    rewrite_part(run, lambda data: data[:-1])
    asked: list[object] = []

    def vote(reason: str, snapshot: Snapshot | None) -> bool:
        asked.append(snapshot.step if snapshot is not None else "damaged" in reason)
        return True  # the others could: what is damaged here is not taken all the same

    job, options = Job(), flashckpt.Options()
    session = open_session(run, flashckpt.Keep(), options, Environment.read(), group=Voting(vote))
    with attach_to(session, Tree(job.named), saving_by_hand(run), began=0.0) as checkpointer:
        assert checkpointer.completed == 2
    assert asked == [True, 2, False], "not the damaged one, the next one, and its bytes"
