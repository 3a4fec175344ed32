"""Runs of two ranks with constants, the stores between which they are copied, and bytes that are harmed."""

import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import unquote

import pytest

from flashckpt import crashpoints
from flashckpt.commit import attempts, commit_step
from flashckpt.commit.commit_step import KEEP_ALL
from flashckpt.commit.view import View, open_run
from flashckpt.format.names import AttemptName, SnapshotId
from flashckpt.replication.run_copy import StepCopier
from flashckpt.store.base import Store
from flashckpt.store.local import LocalStore
from tests.commit.runs import attempt_at, folder_of, name_of, publish
from tests.contracts.flat_store import FlatStore
from tests.run_view import delete as delete

PAIRS = [("local", "local"), ("local", "flat"), ("flat", "local")]


def opened(kind: str, folder: Path) -> Store:
    return LocalStore(str(folder)) if kind == "local" else FlatStore(f"flat://{folder}")


def made(store: Store, steps: Iterable[int]) -> AttemptName:
    """A run with these steps, each of two nodes with a rank and constants."""
    open_run(store, create=True)
    attempt = attempt_at(store)
    attempts.mark_ended(store, attempt, "closed")
    for step in steps:
        add(store, step, attempt)
    return attempt


def add(store: Store, step: int, attempt: AttemptName) -> None:
    for rank in (0, 1):
        publish(store, step, attempt, ranks=(rank,), world=2, constants=True)
    assert commit_step.commit(View.of(store), folder_of(store, name_of(step, attempt).id), KEEP_ALL)


def visible(store: Store) -> list[int]:
    """The numbers of the visible steps, oldest first."""
    return [each.step for each in View.of(store).visible()]


def mirrored(source: Store, target: Store) -> StepCopier:
    """A copier to a target that is the same run already."""
    open_run(target, create=True, run_id=open_run(source, create=False).run_id)
    return StepCopier(source, target)


def watch(target: Store, patch: pytest.MonkeyPatch, point: Callable[[str], None]) -> None:
    """Call `point` with the name of each crash point, and before and after the target gets a manifest or a
    version of its catalogue."""

    def watched(write: Callable[[str, bytes], bool | None]) -> Callable[[str, bytes], bool | None]:
        def written(path: str, data: bytes) -> bool | None:
            kind = next((kind for kind in ("catalogue/", "/manifest-") if kind in path), "")
            point(f"{kind.strip('/-')}.creating")
            done = write(path, data)
            point(f"{kind.strip('/-')}.created")
            return done

        return written

    patch.setattr(crashpoints, "point", point)
    patch.setattr(target, "create", watched(target.create))
    patch.setattr(target, "replace", watched(target.replace))


def once_at(point: str, act: Callable[[], None]) -> Callable[[str], None]:
    """What acts at a point of `watch`, once; with `:2` when it comes for the second time."""
    wanted, _, count = point.partition(":")
    passed: list[str] = []

    def passing(name: str) -> None:
        passed.append(name)
        if name == wanted and passed.count(wanted) == int(count or 1):
            passed.extend([wanted] * 9)
            act()

    return passing


def killed_at(point: str, target: Store, patch: pytest.MonkeyPatch, work: Callable[[], object]) -> None:
    """Do the work in a child that is killed at a point of `watch`."""
    child = os.fork()
    if not child:
        watch(target, patch, once_at(point, lambda: os.kill(os.getpid(), signal.SIGKILL)))
        work()
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL, "the point was never reached"


def files(folder: Path) -> dict[str, bytes]:
    """What a store's folder holds, by its path in the run."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {unquote(name): data for name, data in found.items()}


def of_step(folder: Path) -> dict[str, bytes]:
    """Parts and shards by their snapshot and name, and frozen files by their name. A copy has the same ones
    in other folders, and manifests of its own."""
    found = {}
    for name, data in files(folder).items():
        place, _, file = name.rpartition("/")
        if name.startswith("data/") and file.startswith(("rank-", "node-", "frozen-")):
            snapshot = place.rpartition("/")[2]
            found[file if file.startswith("frozen-") else f"{snapshot}/{file}"] = data
    return {name: data for name, data in found.items() if name.endswith((".safetensors", ".json"))}


@pytest.fixture
def tmp_path(scratch: str) -> Path:
    return Path(scratch)


@pytest.fixture(params=PAIRS, ids="-".join)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Store, Store]:
    kinds = request.param
    return opened(kinds[0], tmp_path / "source"), opened(kinds[1], tmp_path / "target")


@pytest.fixture
def near(tmp_path: Path) -> tuple[Store, Store]:
    return opened("local", tmp_path / "source"), opened("flat", tmp_path / "target")


def named(folder: Path, file: str, id: SnapshotId | None = None) -> list[Path]:
    """The files of a run with a name that begins so; of frozen files, those of rank 1. `id`: of this snapshot
    alone, whose frozen file may be in the folder of another one."""
    of = "" if id is None or "frozen-" in file else f"/{id.attempt}.{id.boundary:020d}/"
    paths = {path: unquote(str(path)) for path in sorted(folder.rglob("*")) if path.is_file()}
    return [path for path, name in paths.items() if is_of(name, file) and of in name]


def is_of(name: str, file: str) -> bool:
    return f"/{file}" in f"/{name}" and ("frozen-" not in file or "-00001-" in name)


def flipped(data: bytes) -> bytes:
    middle = len(data) * 2 // 3
    return data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]
