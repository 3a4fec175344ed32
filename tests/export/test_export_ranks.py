"""Exports of several ranks' steps as whole tensors: bit for bit, and with one tensor in memory at a time."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import flashckpt
from flashckpt.errors import DamagedError
from flashckpt.export.step import export
from flashckpt.restore.step_tensors import TensorSlice
from flashckpt.restore.whole_tensors import WholeTensors, pieces
from flashckpt.store.local import LocalStore
from tests.commit.runs import new_run
from tests.folders import flip
from tests.restore.sharded import Held, committed, whole

WORLD = 4
MIB = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return new_run(tmp_path / "run")


def rows(whole: np.ndarray, rank: int, world: int = WORLD) -> TensorSlice:
    each = -(-whole.shape[0] // world)
    first = min(rank * each, whole.shape[0])
    return TensorSlice(
        (first, *(0 for _ in whole.shape[1:])), (min(each, whole.shape[0] - first), *whole.shape[1:])
    )


def numbers(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def state() -> tuple[dict[str, np.ndarray], list[list[Held]]]:
    """The tensors, and each rank's share. Rank 2 writes the replica; the counter differs between ranks."""
    tensors = {
        "model.rows": numbers((10, 3), 1),
        "model.columns": numbers((4, 8), 2),
        "model.bias": numbers((5,), 3),
        "optimizer.step": np.array(7, "float32"),
        "model.seen": np.array([0], "int64"),
    }
    ranks = []
    for rank in range(WORLD):
        columns = TensorSlice((0, 2 * rank), (4, 2))
        ranks.append(
            [
                Held("model.rows", tensors["model.rows"], rows(tensors["model.rows"], rank), ("model.tied",)),
                Held("model.columns", tensors["model.columns"], columns),
                Held("model.bias", tensors["model.bias"], whole(tensors["model.bias"]), writer=2),
                Held("optimizer.step", tensors["optimizer.step"], whole(tensors["optimizer.step"])),
                Held("model.seen", np.array([rank], "int64"), TensorSlice((0,), (1,))),
            ]
        )
    return tensors, ranks


def is_same(found: torch.Tensor, expected: np.ndarray) -> bool:
    return tuple(found.shape) == expected.shape and found.numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_whole_tensors_are_exported_by_their_names(store: LocalStore, tmp_path: Path, format: str) -> None:
    tensors, ranks = state()
    record = committed(store, ranks)
    done = export(store, str(tmp_path / "out"), format=format)
    assert [name for name, _ in done.files] == ["out"]
    if format == "torch":
        found = torch.load(tmp_path / "out", weights_only=True)
        assert found.pop("model.tied") is not None
    else:
        found = load_file(tmp_path / "out")
        with safe_open(tmp_path / "out", "pt") as file:
            assert '"model.tied": "model.rows"' in file.metadata()["flashckpt.aliases"]
            assert file.metadata()["flashckpt.world"] == str(WORLD)
    assert found.keys() == tensors.keys()
    assert all(is_same(found[name], each) for name, each in tensors.items())
    loaded = flashckpt.load(store.url)
    assert all(is_same(loaded[name], each) for name, each in tensors.items())
    assert loaded["model.tied"] is loaded["model.rows"]

    export(store, str(tmp_path / "part"), only=["optimizer", "model.tied"])
    part = load_file(tmp_path / "part")
    assert part.keys() == {"optimizer.step", "model.tied"}
    assert is_same(part["model.tied"], tensors["model.rows"])

    path = Path(store.url, record.shard_path(3))
    flip(path, -1)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DamagedError, match=path.name):
        export(store, str(tmp_path / "other"), format=format)
    assert sorted(tmp_path.iterdir()) == before


def test_an_empty_tensor_is_cast(store: LocalStore, tmp_path: Path) -> None:
    empty, full = np.zeros((0, 3), "float32"), np.ones(2, "float32")
    held = [Held("model.none", empty, whole(empty)), Held("model.full", full, whole(full))]
    committed(store, [held] * WORLD)
    export(store, str(tmp_path / "out"), dtype="bf16")
    found = load_file(tmp_path / "out")
    assert found["model.none"].dtype == found["model.full"].dtype == torch.bfloat16
    assert found["model.none"].shape == (0, 3)


def test_a_tensor_larger_than_the_memory_of_an_export(store: LocalStore, tmp_path: Path) -> None:
    tensor = np.arange(24 * MIB, dtype="float32").reshape(-1, 1024)
    committed(store, [[Held("model.large", tensor, rows(tensor, rank))] for rank in range(WORLD)])
    tracemalloc.start()
    try:
        export(store, str(tmp_path / "out"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Four pieces of 8 MiB, a block of 16 MiB for each of two threads, and imports.
    assert peak < 90 * MIB < tensor.nbytes
    assert is_same(load_file(tmp_path / "out")["model.large"], tensor)


def test_a_tensor_in_several_slices_of_columns(store: LocalStore, tmp_path: Path) -> None:
    tensor = np.arange(2 * MIB, dtype="float32").reshape(-1, 1024)
    columns = [TensorSlice((0, 256 * rank), (tensor.shape[0], 256)) for rank in range(WORLD)]
    record = committed(store, [[Held("model.large", tensor, region)] for region in columns])
    tensors = WholeTensors(record)
    [leaf] = tensors.leaves
    found = [piece for _, piece in pieces(store, [(leaf, tensors.parts(leaf))], 2, MIB // 4)]
    assert len(found) > 5
    assert b"".join(found) == tensor.tobytes()
    export(store, str(tmp_path / "out"))
    assert is_same(load_file(tmp_path / "out")["model.large"], tensor)


def test_a_wrong_digest_is_found_in_slices(store: LocalStore) -> None:
    """All checksums of chunks are right, but a rank's slice differs from its capture."""
    tensor = np.arange(3 * MIB, dtype="float32").reshape(-1, 1024)
    record = committed(store, [[Held("model.large", tensor, rows(tensor, rank, 2))] for rank in range(2)])
    wrong = (record.rank(1).shard.digests[0] ^ 1,)
    object.__setattr__(record.rank(1).shard, "digests", wrong)
    tensors = WholeTensors(record)
    [leaf] = tensors.leaves
    with pytest.raises(DamagedError, match=r"model\.large is not what was captured"):
        list(pieces(store, [(leaf, tensors.parts(leaf))], 2, MIB))
