"""A job deletes steps while another process loads, verifies, exports or lists them: what is told is a whole
step or, of one that was named, that it is not there. Never a raw error, and never damage."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from flashckpt.cli.history import step_rows
from flashckpt.commit.choice import Stored
from flashckpt.commit.commit_step import collect
from flashckpt.commit.lineage import next_start, resolve
from flashckpt.commit.verification import verify
from flashckpt.commit.view import View
from flashckpt.errors import NoSuchStepError
from flashckpt.export.step import export
from flashckpt.format.catalogue import EMPTY
from flashckpt.options import Keep
from flashckpt.replication.run_copy import copy_run
from flashckpt.restore.loading import load_leaves
from flashckpt.store.local import LocalStore
from tests.commit.runs import attempt_at, commit, leaves_of, new_run

NEWEST = 300


READINGS = {"read", "list", "exists", "read_chunks", "read_bytes"}


class Living(LocalStore):
    """Just before the reading of number `at` its job commits two steps and deletes all that are older."""

    def __init__(self, root: str, at: int) -> None:
        super().__init__(root)
        self.left = at

    def __getattribute__(self, name: str) -> Any:
        if name in READINGS:
            self.strike()
        return super().__getattribute__(name)

    def strike(self) -> None:
        self.left -= 1
        if self.left == -1:
            job = LocalStore(self.url)
            attempt = resolve(job).attempt
            for step in (400, 500):
                commit(job, step, attempt, keep=Keep(last=2))
            assert [each.step for each in View.of(job).visible()] == [400, 500]
            collect(job, View.of(job).catalogue)


def load(store: Living, step: int | None) -> None:
    found = load_leaves(store, step, only=None)
    number = int(found["optimizer.step"])
    assert number in ((NEWEST, 500) if step is None else (step,))
    assert {name: leaf.numpy().tobytes() for name, leaf in found.items()} == {
        name: leaf.tobytes() for name, leaf in leaves_of(number).items()
    }


def look(store: Living, step: int | None) -> None:
    report = verify(store, step)
    assert report.ok, report.damaged
    assert report.rows
    assert step is None or {row.step for row in report.rows} == {step}


def take_out(store: Living, step: int | None) -> None:
    out = Path(store.url).with_suffix(".safetensors")
    try:
        done = export(store, str(out), step=step)
    except Exception:
        assert not out.exists()
        raise
    assert done.step in ((NEWEST, 500) if step is None else (step,))
    found = load_file(out)
    assert {name: leaf.tobytes() for name, leaf in found.items()} == {
        name: leaf.tobytes() for name, leaf in leaves_of(done.step).items()
    }


def listed(store: Living, step: int | None) -> None:
    rows = step_rows(store, all_branches=False)
    assert not [row for row in rows if row.problem]
    assert rows


def remote(store: Living, step: int | None) -> None:
    """An empty home would begin anew if its mirror had no step."""
    home = View(EMPTY, LocalStore(f"{store.url}-home"))
    choice = next_start(home, remote=Stored(EMPTY, store))
    assert choice.candidates
    assert choice.refusal is None


READERS = [
    *product([load], [None, NEWEST]),
    *(
        pytest.param(read, step, marks=pytest.mark.long)
        for read, step in [*product([look, take_out], [None, NEWEST]), (listed, None), (remote, None)]
    ),
]


@pytest.mark.parametrize(("read", "step"), READERS)
def test_a_step_that_goes_at_any_reading_is_whole_or_not_there(
    read: Callable[[Living, int | None], None], step: int | None, tmp_path: Path
) -> None:
    refused, wrong = 0, []
    for at in range(1000):
        run = new_run(tmp_path / str(at))
        attempt = attempt_at(run)
        for each in (200, NEWEST):
            commit(run, each, attempt)
        living = Living(run.url, at)
        try:
            read(living, step)
        except NoSuchStepError as error:
            refused += 1
            if step is None:
                wrong.append((at, error))
        except Exception as error:
            wrong.append((at, error))
        if living.left >= 0:
            break
    assert wrong == []
    assert at > 2
    assert (refused > 3) == (step is not None)


def test_of_all_steps_a_copy_has_some_though_all_go_that_were_there(tmp_path: Path) -> None:
    """Else it ends well, and nothing was copied."""
    run = new_run(tmp_path / "run")
    attempt = attempt_at(run)
    for each in (200, NEWEST):
        commit(run, each, attempt)

    class Copied(Living):
        def descriptor(self, *what: Any) -> int | None:
            if self.left > 0:
                self.left = 0
                self.strike()
            return super().descriptor(*what)

    target = LocalStore(str(tmp_path / "copy"))
    done = copy_run(Copied(run.url, 10**6), target, all_steps=True)
    assert [each.name.step for each in done.steps if each.is_visible] == [500, 400]
    assert verify(target).ok
