"""Runs that were written by each version of the format, as files: read, verified, resumed from, listed and
exported. Every digest and value is what was written down beside them. They are never written again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import flashckpt
from flashckpt import Keep
from flashckpt._native import xxh3_128
from flashckpt.commit.attempts import attempts
from flashckpt.commit.lineage import visible
from flashckpt.commit.retention import bury
from flashckpt.commit.steps import commit, read_step
from flashckpt.export.step import export
from flashckpt.format.checked_json import FORMAT, NEWEST_FORMAT, JsonRecord
from flashckpt.format.layout import PAGE
from flashckpt.format.names import ATTEMPTS, MARK, PART, RUN, claim_number, manifest_path
from flashckpt.format.records import CHUNK_BYTES, Alive, Claim, Mark, Part, Run, Start, manifest_of
from flashckpt.store import open_store
from flashckpt.store.local import LocalStore
from tests.commit.runs import write_shard
from tests.compat.contents import contents
from tests.compat.state import Job, tensor_sha256

HERE = Path(__file__).parent
KEPT = sorted(each.name for each in HERE.glob("v*"))


@pytest.fixture(params=KEPT)
def kept(request: pytest.FixtureRequest) -> Path:
    return HERE / str(request.param)


@pytest.fixture
def run(kept: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(kept / "run", tmp_path / "run"))


@pytest.fixture
def expected(kept: Path) -> Any:
    return json.loads((kept / "expected.json").read_text())


def test_a_run_of_this_version_is_kept() -> None:
    assert {f"v{FORMAT}", f"v{NEWEST_FORMAT}"} <= set(KEPT)


def test_all_of_it_is_what_it_was(run: Path, expected: Any) -> None:
    assert contents(run) == expected
    assert flashckpt.verify(run).ok


def test_what_was_about_to_go_comes_back_as_it_was(run: Path, expected: Any) -> None:
    """Somebody claims while a step of it is about to be deleted."""
    store = LocalStore(str(run))
    for each in visible(store):
        path = run / manifest_path(each.step, each.attempt)
        before = path.read_bytes()
        assert not bury(store, each.step, each.attempt, lambda: False)
        assert path.read_bytes() == before
    assert contents(run) == expected


def test_training_goes_on_from_it(run: Path, kept: Path, expected: Any, runtime: Path) -> None:
    if not kept.name.startswith("v4"):
        pytest.skip("positions of loaders had another form when it was written")
    job, newest = Job(seed=9), str(expected["visible"][-1])
    with flashckpt.attach(
        run, every=None, persist_every=None, keep=Keep(last=9), **job.named
    ) as checkpointer:
        assert checkpointer.completed == int(newest) == job.own["seen"]
        assert job.own == {"seen": int(newest), "names": ["a", "b"], "pair": (1, 2.5)}
        for name, tensor in job.model.state_dict().items():
            assert tensor_sha256(tensor) == expected["loaded"][newest][f"model.{name}"], name
        assert {int(each["step"]) for each in job.optimizer.state_dict()["state"].values()} == {int(newest)}
        assert job.model.tied.weight is job.model.encoder.weight
        job.train()
        checkpointer.step()
        checkpointer.save()
        checkpointer.wait()
    assert flashckpt.steps(run) == [*expected["visible"], int(newest) + 1]
    assert flashckpt.verify(run).ok


def test_it_is_exported(run: Path, expected: Any, tmp_path: Path) -> None:
    newest = str(expected["visible"][-1])
    export(open_store(run), str(tmp_path / "out.safetensors"))
    found = load_file(tmp_path / "out.safetensors")
    wanted = expected["loaded"][newest]
    assert found["model.encoder.weight"].shape == (6, 4)
    for name, tensor in found.items():
        if tensor.dtype == flashckpt.load(run, int(newest))[name].dtype:
            assert tensor_sha256(tensor) == wanted[name]


# What is written now


@pytest.fixture
def current(run: Path, kept: Path) -> Path:
    if kept.name not in (f"v{FORMAT}", f"v{NEWEST_FORMAT}"):
        pytest.skip("this version writes another format")
    return run


RECORDS: list[tuple[Callable[[Path], bool], Callable[[bytes, str], JsonRecord]]] = [
    (lambda path: path.name == RUN, Run.from_bytes),
    (lambda path: path.parent.name == ATTEMPTS and claim_number(path.name) is not None, Claim.from_bytes),
    (lambda path: path.name == "start.json", Start.from_bytes),
    (lambda path: path.name == "alive", Alive.from_bytes),
    (lambda path: PART.fullmatch(path.name) is not None, Part.from_bytes),
    (lambda path: path.name == "manifest.json", manifest_of),
    (lambda path: MARK.fullmatch(path.name) is not None, Mark.from_bytes),
]


def test_the_records_are_written_byte_for_byte(current: Path) -> None:
    seen = set()
    for path in (each for each in current.rglob("*") if each.is_file() and each.suffix != ".safetensors"):
        [read] = [read for is_one, read in RECORDS if is_one(path)]
        record = read(path.read_bytes(), path.name)
        assert record.to_bytes() == path.read_bytes(), path
        seen.add(record.KIND)
    assert seen == {"run", "claim", "start", "alive", "part", "manifest", "tombstone", "mark"}


def test_a_manifest_is_written_byte_for_byte_from_its_parts(current: Path) -> None:
    store = LocalStore(str(current))
    [each] = [each for each in visible(store) if each.attempt == attempts(store)[-1].name]
    path = Path(store.local_path(manifest_path(each.step, each.attempt)))
    before = path.read_bytes()
    path.unlink()
    assert commit(store, each.step, each.attempt, 1)
    assert path.read_bytes() == before


def test_shards_are_written_byte_for_byte_from_their_leaves(current: Path, tmp_path: Path) -> None:
    store, again = LocalStore(str(current)), LocalStore(str(tmp_path / "again"))
    for each in visible(store):
        record = read_step(store, each.step, each.attempt)
        for path, found in record.files(0):
            data, layout = (current / path).read_bytes(), found.layout()
            assert data[: layout.data_start] == layout.header
            assert layout.data_start % PAGE == 0
            if not again.exists(path):
                write_shard(again, path, data, layout)
            assert (tmp_path / "again" / path).read_bytes() == data
            chunks = [data[i : i + CHUNK_BYTES] for i in range(0, len(data), CHUNK_BYTES)]
            assert found.shard.checksums == b"".join(xxh3_128(chunk) for chunk in chunks)
