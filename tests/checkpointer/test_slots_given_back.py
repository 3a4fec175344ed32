"""Slots that were granted and are not used do not stay in memory, though the keeper lives on."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import flashckpt
from flashckpt import _native
from flashckpt.keeper.client import KeeperClient
from tests.checkpointer.test_bad_input import trained
from tests.checkpointer.test_loop import Job
from tests.processes import keepers_of
from tests.waiting import until


def regions(runtime: Path) -> list[Path]:
    return sorted(runtime.glob("*/*/slot-*"))


class _Left(Exception):
    pass


def test_slots_that_were_ready_and_never_taken(tmp_path: Path, runtime: Path) -> None:
    def leave() -> None:
        with flashckpt.attach(tmp_path / "run", every=None, **Job().named) as checkpointer:
            checkpointer._attendant.prepare(4096, 1 << 16)
            until(lambda: checkpointer._attendant._ready is not None, "slots")
            assert len(regions(runtime)) == 3
            raise _Left

    with pytest.raises(_Left):
        leave()
    until(lambda: not regions(runtime), "the regions to go")
    assert keepers_of(runtime), "it lingers: nobody has said that the run is over"


def test_slots_that_cannot_be_made_usable(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "no memory can be faulted in")

    monkeypatch.setattr(_native, "populate", refuses)
    with flashckpt.attach(tmp_path / "run", every=None, **Job().named) as checkpointer:
        attendant = checkpointer._attendant
        attendant.prepare(4096, 1 << 16)
        until(lambda: attendant.slots_error is not None, "the failure")
        until(lambda: not regions(runtime), "the regions to go")
        monkeypatch.undo()
        attendant.prepare(4096, 1 << 16)
        until(lambda: attendant._ready is not None, "slots")
        assert len(regions(runtime)) == 3


def test_slots_that_are_written_are_not_given_back(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be granted again among others, and those then fail."""
    released: list[str] = []
    release = KeeperClient.release

    def seen(client: KeeperClient, names: Sequence[str]) -> None:
        released.extend(names)
        release(client, names)

    monkeypatch.setattr(KeeperClient, "release", seen)
    with flashckpt.attach(tmp_path / "run", every=None, **Job().named) as checkpointer:
        checkpointer.save()
        names = [path.name for path in regions(runtime)]
        checkpointer._attendant._give_back([*names, "slot-00000-9-0123456789abcdef"])
        assert len(names) == 3
        assert released == ["slot-00000-9-0123456789abcdef"]


def test_a_resume_that_fails_leaves_nothing_but_what_survived(
    tmp_path: Path, runtime: Path, kill_keepers: Callable[..., None]
) -> None:
    run = tmp_path / "run"
    trained(run, [2])
    kill_keepers(remove_regions=True)
    with pytest.raises(flashckpt.MismatchError):
        flashckpt.attach(run, **Job(width=5).named)
    until(lambda: not regions(runtime), "the region that the step was read into to go")
    with flashckpt.attach(run, **Job().named) as checkpointer:
        assert (checkpointer.completed, checkpointer.resumed and checkpointer.resumed.tier) == (2, "local")
