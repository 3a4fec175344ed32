"""Runs of two ranks with constants, the stores between which they are copied, and bytes that are harmed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote

import pytest

from flashckpt.commit import attempts, collect, commit_step
from flashckpt.commit.attempts import open_run
from flashckpt.commit.catalogue import Catalogue
from flashckpt.format.names import AttemptName, CommitName
from flashckpt.replication.run_copy import StepCopier
from flashckpt.store.base import Store
from flashckpt.store.local import LocalStore
from tests.commit.runs import attempt_at, name_of, publish
from tests.contracts.flat_store import FlatStore

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
        publish(store, step, attempt, ranks=(rank,), world=2, keeper=rank, constants=True)
    assert commit_step.commit(store, name_of(step, attempt).id, 2)


def visible(store: Store) -> list[int]:
    """The numbers of the visible steps, oldest first."""
    return [each.step for each in Catalogue.of(store).visible()]


def delete(store: Store, name: CommitName) -> None:
    """Delete a step as retention does."""
    catalogue = Catalogue.of(store)
    assert catalogue.newest_claimed is not None
    plan = collect.Plan(snapshots=(name.id,))
    assert collect.execute(store, plan, catalogue, catalogue.newest_claimed).snapshots == [name.id]


def mirrored(source: Store, target: Store) -> StepCopier:
    """A copier to a target that is the same run already."""
    open_run(target, create=True, run_id=open_run(source, create=False).run_id)
    return StepCopier(source, target)


def files(folder: Path) -> dict[str, bytes]:
    """What a store's folder holds, by its path in the run."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {unquote(name): data for name, data in found.items()}


def of_step(folder: Path) -> dict[str, bytes]:
    """Of steps and constants, the files that anybody reads."""
    return {name: data for name, data in files(folder).items() if name.endswith((".safetensors", ".json"))}


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


def has_name(path: Path, file: str) -> bool:
    """Whether a file of a run has a name that begins so; of frozen instances, that of rank 1."""
    return path.is_file() and is_of(unquote(str(path)), file)


def is_of(name: str, file: str) -> bool:
    return f"/{file}" in f"/{name}" and ("frozen/" not in file or "-00001-" in name)


def flipped(data: bytes) -> bytes:
    middle = len(data) * 2 // 3
    return data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]
