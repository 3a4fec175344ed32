"""A collective is aborted on devices: no snapshot of what is computed after it is sealed or resumed from.

Real ranks and a real keeper; the device and the abort are emulated (`aborted.py`).
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

import flashckpt
from flashckpt.ranks.liveness import failure_of, group_failure
from tests.ranks.launch import Ended, Launch, Launcher
from tests.ranks.test_ddp import steps_of

pytestmark = pytest.mark.dist
PROGRAM, STEPS, END = "tests.ranks.aborted", 12, 6


def start(launcher: Launcher, run: Path, **orders: object) -> Launch:
    return launcher.fork(PROGRAM, run, json.dumps({"steps": STEPS} | orders))


@pytest.fixture
def whole(launcher: Launcher, tmp_path: Path) -> list[Ended]:
    """A run in which nothing is aborted. It ends in order, and its last step is committed."""
    ended = start(launcher, tmp_path / "whole").finished()
    assert flashckpt.steps(tmp_path / "whole")[-1] == STEPS
    return ended


def assert_resumes(whole: list[Ended], launcher: Launcher, run: Path, step: int) -> None:
    """Both ranks resume this step, from memory, and end with the bits of a run in which nothing happened."""
    assert flashckpt.steps(run)[-1] == step, "no keeper commits what is not confirmed"
    for rank, ended in enumerate(start(launcher, run).finished()):
        assert ended.out[0] == f"resumed {step} memory"
        expected = steps_of(whole[rank].out)
        assert steps_of(ended.out) == {each: expected[each] for each in range(step + 1, STEPS + 1)}
    assert flashckpt.steps(run)[-1] == STEPS


@pytest.mark.parametrize("end_by", ["SIGKILL", "exception"])
def test_what_was_computed_after_an_abort_is_not_resumed_from(
    launcher: Launcher, tmp_path: Path, whole: list[Ended], end_by: str
) -> None:
    """The ranks end in the iteration after the abort. Its snapshot is complete; no boundary followed it."""
    run = tmp_path / "run"
    launch = start(launcher, run, abort_at=END, end_at=END, end_by=end_by)
    ended = launch.ended()
    assert [each.status for each in ended] == ([None, None] if end_by == "SIGKILL" else [1, 1]), launch.told()
    aborted = steps_of(ended[0].out)[END]
    assert aborted != steps_of(whole[0].out)[END], "the abort has changed the state"
    assert_resumes(whole, launcher, run, END - 1)


def test_ends_in_order_and_waits_persist_the_last_snapshot(launcher: Launcher, tmp_path: Path) -> None:
    """wait() returns although no other boundary is entered. A signal ends the loop at a boundary, whose
    snapshot is committed."""
    run = tmp_path / "run"
    for ended in start(launcher, run, steps=300, wait_at=4, end_at=END, end_by="SIGTERM").ended():
        assert "safe 4" in ended.out
        last = max(steps_of(ended.out))
    assert END <= last < 300
    assert flashckpt.steps(run)[-1] == last


@pytest.mark.long
def test_nothing_is_confirmed_once_a_process_group_reports_an_error(
    launcher: Launcher, tmp_path: Path, whole: list[Ended]
) -> None:
    """A host that runs ahead of its device enters boundaries after the abort. The snapshot of the step before
    may have been copied after it, too."""
    run = tmp_path / "run"
    ended = start(launcher, run, abort_at=END, failed_at=END, wait_at=END + 2).ended()
    for each in ended:
        assert each.status == 1
        assert "PersistError" in each.err
        said = f"The snapshot of step {END - 1} was discarded: a process group reports TIMEOUT"
        assert each.err.count("was discarded") == each.err.count(said) == 1
    assert_resumes(whole, launcher, run, END - 2)


class Group:
    """A process group whose backends report these errors; None: the backend cannot be asked."""

    def __init__(self, **errors: Any) -> None:
        self._device_types = [torch.device(kind) for kind in errors]
        self._errors = errors

    def _get_backend(self, device: torch.device) -> Any:
        error = self._errors[device.type]
        return SimpleNamespace(get_error=lambda: error) if error is not None else object()


def test_an_error_of_any_process_group_counts() -> None:
    good = Group(cuda=ErrorType.SUCCESS, cpu=None)
    assert failure_of([good, object()]) == ""
    assert "TIMEOUT" in failure_of([good, Group(cpu=None, cuda=ErrorType.TIMEOUT)])
    assert "COMM_ERROR" in failure_of([Group(cuda=ErrorType.COMM_ERROR), good])


def test_the_groups_of_this_process_are_asked() -> None:
    assert group_failure() == "", "there are none"
    failed = Group(cuda=ErrorType.REMOTE_ERROR)
    dist.distributed_c10d._world.pg_map[failed] = ("failed", None)  # type: ignore[index, assignment]
    try:
        assert "REMOTE_ERROR" in group_failure()
    finally:
        del dist.distributed_c10d._world.pg_map[failed]  # type: ignore[arg-type]
