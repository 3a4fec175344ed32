"""Writer and Reader under torch's own save and load, in one process."""

import errno
import json
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors import safe_open
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

import flashckpt.dcp as dcp
from flashckpt.dcp import reader, writer
from flashckpt.errors import (
    DamagedError,
    MismatchError,
    NoSuchStepError,
    OptionError,
    PersistError,
    RunError,
    StateError,
)  # fmt: skip
from flashckpt.store import open_store
from flashckpt.store.local import LocalStore
from tests.contracts.flat_store import FlatStore
from tests.dcp.states import equal, state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(value: dict[str, Any], path: Path, made: dcp.Writer | None = None, planner: Any = None) -> None:
    torch_dcp.save(
        value, storage_writer=made or dcp.Writer(path), planner=planner or dcp.SavePlanner(), no_dist=True
    )


def begin(value: dict[str, Any], made: dcp.Writer, planner: Any = None, **folder: Path) -> Any:
    """An asynchronous save."""
    planner = planner or dcp.SavePlanner()
    return torch_dcp.async_save(value, storage_writer=made, planner=planner, no_dist=True, **folder)


class Slow(dcp.SavePlanner):
    """Says when a save has begun, and lets it end when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may_end = threading.Event(), threading.Event()

    def resolve_data(self, write_item: Any) -> Any:
        self.begun.set()
        assert self.may_end.wait(60)
        return super().resolve_data(write_item)


def load(value: dict[str, Any], path: Path, made: dcp.Reader | None = None, planner: Any = None) -> None:
    torch_dcp.load(
        value, storage_reader=made or dcp.Reader(path), planner=planner or dcp.LoadPlanner(), no_dist=True
    )


def loaded(path: Path) -> dict[str, Any]:
    """The content of the folder's checkpoint."""
    found = state(9)
    load(found, path)
    return found


def refused(call: Callable[[], object], kind: type[BaseException]) -> str:
    """The message of an error of this kind inside torch's error."""
    with pytest.raises(CheckpointException) as raised:
        call()
    text = str(raised.value)
    is_kind = any(isinstance(error, kind) for error, _ in raised.value.failures.values())
    assert is_kind or kind.__name__ in text or "read failed" in text, text
    return text


def files(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def test_a_state_dict_round_trips_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a pickle")

    for name in ("save", "load"):
        monkeypatch.setattr(torch, name, never)
    for name in ("dumps", "loads", "dump"):
        monkeypatch.setattr(pickle, name, never)
    given = state(3)
    save(given, tmp_path)
    found = state(9)
    weight, steps = found["model"]["weight"], found["steps"]
    load(found, tmp_path)
    assert equal(found, given)
    assert found["model"]["weight"] is weight, "it is filled where it is"
    assert found["steps"] is steps
    assert list(steps) == [0, 1]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["metadata.json", files(tmp_path)[0].name]
    json.loads((tmp_path / "metadata.json").read_text())
    with safe_open(files(tmp_path)[0], "pt") as opened:
        assert torch.equal(opened.get_tensor("model.weight"), given["model"]["weight"])


def test_a_part_of_it_is_loaded_and_the_rest_is_unchanged(tmp_path: Path) -> None:
    save({"a": 1, "w": torch.ones(3)}, tmp_path)
    found = {"a": 0, "b": {"set": {1}, "list": [{2}, (3,)]}}
    load(found, tmp_path, planner=dcp.LoadPlanner(allow_partial_load=True))
    assert found == {"a": 1, "b": {"set": {1}, "list": [{2}, (3,)]}}
    part = {"w": torch.zeros(3)}
    load(part, tmp_path)
    assert part["w"].tolist() == [1, 1, 1]


def test_one_writer_saves_again_and_leaves_one_checkpoint(tmp_path: Path) -> None:
    made = dcp.Writer(tmp_path)
    for seed in (1, 2, 3):
        save(state(seed), tmp_path, made)
        assert equal(loaded(tmp_path), state(seed))
    assert len(files(tmp_path)) == 1


def test_a_checkpoint_id_names_the_folder(tmp_path: Path) -> None:
    made: dict[str, Any] = {"storage_writer": dcp.Writer(), "planner": dcp.SavePlanner()}
    for seed in (1, 2):
        torch_dcp.save(state(seed), checkpoint_id=tmp_path / str(seed), no_dist=True, **made)
    found, made = state(9), {"storage_reader": dcp.Reader(), "planner": dcp.LoadPlanner()}
    torch_dcp.load(found, checkpoint_id=tmp_path / "1", no_dist=True, **made)
    assert equal(found, state(1))


# Refused


def test_a_planner_that_pickles_is_refused_by_name(tmp_path: Path) -> None:
    save(state(1), tmp_path)
    planner = DefaultSavePlanner()
    text = refused(lambda: save(state(2), tmp_path, planner=planner), OptionError)
    assert "DefaultSavePlanner" in text
    assert "planner=flashckpt.dcp.SavePlanner()" in text
    text = refused(lambda: load(state(9), tmp_path, planner=DefaultLoadPlanner()), OptionError)
    assert "DefaultLoadPlanner" in text
    assert "planner=flashckpt.dcp.LoadPlanner()" in text
    assert equal(loaded(tmp_path), state(1))


class Custom:
    pass


def sliced() -> torch.Tensor:
    """A tensor that describes itself as the first rows of a larger one."""
    made: Any = torch.zeros(2, 3)
    made.global_shape, made.local_sizes = (7, 3), ((2, 3),)
    made.global_offsets = made.local_offsets = ((0, 0),)
    found: torch.Tensor = made
    return found


@pytest.mark.parametrize(
    ("value", "said"),
    [(Custom(), "Custom"), ((1, torch.zeros(2)), "Tensor"), (torch.zeros(3).to_sparse(), "layout"),
     (torch.zeros(3, device="meta"), "meta"), (sliced(), "slices of a larger tensor")],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_unsupported_values_are_refused_by_name_before_anything_is_written(
    tmp_path: Path, value: object, said: str
) -> None:
    save(state(1), tmp_path)
    before = files(tmp_path)
    given = {**state(2), "mine": {"odd": value}}
    text = refused(lambda: save(given, tmp_path), StateError)
    assert "mine.odd" in text
    assert said in text
    assert files(tmp_path) == before
    with pytest.raises(StateError, match=r"mine\.odd"):
        begin(given, dcp.Writer(tmp_path))
    with pytest.raises(StateError, match=r"mine\.odd"):
        dcp.Stager().stage(given)
    assert equal(loaded(tmp_path), state(1))


def test_ranks_that_commit_alone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="use_collectives"):
        dcp.Writer(tmp_path).set_up_storage_writer(True, rank=0, use_collectives=False)
    with pytest.raises(OptionError, match="has no folder"):
        dcp.Writer().set_up_storage_writer(True)


def test_a_checkpoint_of_torch_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    assert "FileSystemReader" in refused(lambda: load(state(9), tmp_path), RunError)


def test_missing_names_are_listed_and_nothing_is_loaded(tmp_path: Path) -> None:
    save({"model": {"a": torch.ones(2), "b": torch.ones(3), "c": 1}}, tmp_path)
    found = {"model": {"a": torch.zeros(2), "b": torch.zeros(4), "c": 0, "d": torch.zeros(1)}}
    text = refused(lambda: load(found, tmp_path), MismatchError)
    assert "model.b: a tensor of [3] in the checkpoint, a tensor of [4] here" in text
    assert "model.d: missing in the checkpoint" in text
    assert (found["model"]["a"].sum(), found["model"]["c"]) == (0, 0)
    del found["model"]["b"]
    load(found, tmp_path, planner=dcp.LoadPlanner(allow_partial_load=True))
    assert (found["model"]["a"].sum(), found["model"]["c"]) == (2, 1)


# Failures


class FailingStore:
    """A store with one method that fails once."""

    def __init__(self, path: Any, method: str) -> None:
        self._store, self._method = open_store(path), method

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            self._method = ""

            def fail(*arguments: Any, **_: Any) -> None:
                if name == "write_parts":  # a disk that is full in the middle of a file
                    next(iter(arguments[1]))
                raise OSError(errno.ENOSPC, "No space left on device")

            return fail
        return getattr(self._store, name)


@pytest.mark.parametrize("method", ["list", "write_parts", "replace", "remove_files"])
def test_each_call_of_the_store_fails_once_in_a_save(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(state(1), tmp_path)
    failing = FailingStore(tmp_path, method)
    with monkeypatch.context() as patched:
        patched.setattr(writer, "open_store", lambda _: failing)
        if method == "remove_files":  # the save is committed by then
            save(state(2), tmp_path)
            assert "could not be removed" in caplog.text
        else:
            refused(lambda: save(state(2), tmp_path), OSError)
    assert equal(loaded(tmp_path), state(2 if method == "remove_files" else 1))
    save(state(3), tmp_path)
    assert equal(loaded(tmp_path), state(3))
    assert len(files(tmp_path)) == 1


@pytest.mark.parametrize("method", ["exists", "read", "read_chunks"])
def test_each_call_of_the_store_fails_once_in_a_load(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(state(1), tmp_path)
    failing, found = FailingStore(tmp_path, method), state(9)
    with monkeypatch.context() as patched:
        patched.setattr(reader, "open_store", lambda _: failing)
        refused(lambda: load(found, tmp_path), OSError)
    assert equal(found, state(9))
    load(found, tmp_path)
    assert equal(found, state(1))


def test_it_is_loaded_from_a_store_that_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(state(1), tmp_path)
    monkeypatch.setattr(reader, "open_store", lambda path: FlatStore(f"flat://{path}"))
    assert equal(loaded(tmp_path), state(1))


def test_a_state_that_changes_while_it_is_saved_is_not_committed(tmp_path: Path) -> None:
    class Changing(dcp.SavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            data = super().resolve_data(write_item)
            return data.double() if write_item.index.fqn == "model.weight" else data

    save(state(1), tmp_path)
    with pytest.raises(CheckpointException, match=r"model\.weight is a torch\.float64"):
        save(state(2), tmp_path, planner=Changing())
    assert equal(loaded(tmp_path), state(1))


def test_a_file_that_the_coordinator_does_not_see_is_not_committed(tmp_path: Path) -> None:
    class OwnDisk(dcp.Writer):
        def write_data(self, plan: Any, planner: Any) -> Any:
            done = super().write_data(plan, planner)
            for file in set(files(tmp_path)) - before:
                file.unlink()
            return done

    save(state(1), tmp_path)
    before = set(files(tmp_path))
    with pytest.raises(CheckpointException, match="not in the coordinator's folder"):
        save(state(2), tmp_path, OwnDisk(tmp_path))
    assert equal(loaded(tmp_path), state(1))


# Damage


def test_a_flipped_byte_and_a_cut_file_are_found(tmp_path: Path) -> None:
    save({"a": torch.arange(4), "b": {"n": 3}}, tmp_path)
    for file in tmp_path.iterdir():
        good = file.read_bytes()
        # Of tensors and values each byte, of the metadata, which have a checksum, every seventh.
        is_shard = file.suffix == ".safetensors"
        start = 8 + int.from_bytes(good[:8], "little") if is_shard else 0
        for at in range(start, len(good), 1 if is_shard else 7):
            file.write_bytes(good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :])
            found = {"a": torch.zeros(4, dtype=torch.int64), "b": {"n": 0}}
            refused(lambda found=found: load(found, tmp_path), DamagedError)
            assert (int(found["a"].sum()), found["b"]) == (0, {"n": 0})
        for cut in (0, 1, len(good) // 2, len(good) - 1):
            file.write_bytes(good[:cut])
            refused(lambda: load({"a": torch.zeros(4, dtype=torch.int64)}, tmp_path), DamagedError)
        file.write_bytes(good)
    load({"a": torch.zeros(4, dtype=torch.int64)}, tmp_path)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    save(state(1), tmp_path)
    files(tmp_path)[0].unlink()
    assert "it is missing" in refused(lambda: load(state(9), tmp_path), DamagedError)
    (tmp_path / "metadata.json").unlink()
    save(state(1), tmp_path)
    (tmp_path / "metadata.json").unlink()
    assert "no save to it was completed" in refused(lambda: load(state(9), tmp_path), NoSuchStepError)


def test_forged_metadata_with_a_valid_checksum_is_refused(tmp_path: Path) -> None:
    from flashckpt.format.checked_json import dump, parse

    save({"a": torch.ones(4)}, tmp_path)
    path = tmp_path / "metadata.json"
    good = parse(path.read_bytes(), what="it", max_bytes=1 << 20)

    def hostile(change: Callable[[dict[str, Any]], None]) -> None:
        obj = json.loads(json.dumps(good))
        change(obj)
        body = {key: obj.pop(key) for key in ("environment", "replicas", "contents")}
        path.write_bytes(dump({key: each for key, each in obj.items() if key != "head"}, body))
        live = {"a": torch.zeros(4)}
        assert refused(lambda: load(live, tmp_path), DamagedError)
        assert not live["a"].any(), "nothing of it was loaded"

    def shard(obj: dict[str, Any]) -> Any:
        return obj["contents"][0]["shard"]

    hostile(lambda obj: shard(obj).__setitem__("file", "../../etc/passwd"))
    hostile(lambda obj: obj["ranks"][0][1].__setitem__(0, "../../etc/passwd"))
    hostile(lambda obj: obj["contents"][0]["shard"]["leaves"].__setitem__("dtypes", ["load"]))
    hostile(lambda obj: obj["contents"][0]["shard"]["leaves"].__setitem__("shapes", [[1 << 40]]))
    hostile(lambda obj: shard(obj).__setitem__("num_bytes", 1 << 40))
    hostile(lambda obj: obj.__setitem__("world", 2))
    hostile(lambda obj: obj.__setitem__("kind", "run"))
    hostile(lambda obj: obj["environment"]["paths"].append(["a", [None]]))
    hostile(lambda obj: obj["environment"].pop("paths"))


# Staging


def test_a_state_may_change_once_async_save_has_returned(tmp_path: Path) -> None:
    given = state(2)
    given["values"]["mine"] = [1]
    before = deepcopy(given)
    slow = Slow()
    done = begin(given, dcp.Writer(tmp_path), slow)
    for each in (given["model"]["weight"], given["model"]["count"], given["model"]["bias"].data):
        each.add_(1)
    given["values"]["mine"].append(2)
    given["steps"][0]["at"] = 17
    slow.may_end.set()
    done.result()
    found = {**state(9), "values": {**state(9)["values"], "mine": [0]}}
    load(found, tmp_path)
    assert equal(found, before)


# Concurrent saves


@pytest.mark.parametrize("is_late", [False, True])
def test_a_save_that_another_overtakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """A second save begins once the first has written its files. It commits between the check of these files
    and the replacement of the metadata, and removes them as those of an earlier save; or it is late."""
    replace, overtaken = LocalStore.replace, []

    def overtake(store: LocalStore, path: str, data: bytes, *, durable: bool = True) -> None:
        if is_late:
            replace(store, path, data, durable=durable)
        if path == "metadata.json" and not overtaken:
            overtaken.append(path)
            save(state(2), tmp_path)
        if not is_late:
            replace(store, path, data, durable=durable)

    monkeypatch.setattr(LocalStore, "replace", overtake)
    if is_late:
        save(state(1), tmp_path)
        assert equal(loaded(tmp_path), state(2)), "a newer checkpoint has replaced it: it has succeeded"
    else:
        said = refused(lambda: save(state(1), tmp_path), PersistError)
        assert "another save to this folder removed" in said
        assert "it is missing" in refused(lambda: load(state(9), tmp_path), DamagedError)
    assert overtaken
    save(state(3), tmp_path)
    assert equal(loaded(tmp_path), state(3))


def test_an_overtaken_save_removes_no_file_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save 2 has written its files before save 1 begins, and commits right after that: to save 1 they are
    those of an earlier save."""
    replace, is_written, may_commit = LocalStore.replace, threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool:

        def ordered(store: LocalStore, path: str, data: bytes, *, durable: bool = True) -> None:
            if threading.current_thread() is not threading.main_thread():
                is_written.set()
                assert may_commit.wait(60)
            replace(store, path, data, durable=durable)
            if threading.current_thread() is threading.main_thread():
                may_commit.set()
                second.result()

        monkeypatch.setattr(LocalStore, "replace", ordered)
        second = pool.submit(save, state(2), tmp_path)
        assert is_written.wait(60)
        save(state(1), tmp_path)
    assert equal(loaded(tmp_path), state(2))


@pytest.mark.parametrize("is_reset", [False, True])
def test_one_writer_in_two_saves_at_once_gives_each_its_folder(tmp_path: Path, is_reset: bool) -> None:
    """torch runs each async_save in a thread of its own: the second begins while the first writes."""
    made, slow = dcp.Writer(tmp_path / "1"), Slow()
    first = begin(state(1), made, slow)
    assert slow.begun.wait(60)
    if is_reset:
        made.reset(tmp_path / "2")
        save(state(2), tmp_path, made)
    else:
        begin(state(2), made, checkpoint_id=tmp_path / "2").result()
    slow.may_end.set()
    first.result()
    assert [equal(loaded(tmp_path / str(number)), state(number)) for number in (1, 2)] == [True, True]


def test_reset_names_the_folder_of_later_saves(tmp_path: Path) -> None:
    """In a thread that has saved to another folder before, too."""
    made, numbers = dcp.Writer(tmp_path / "a"), (1, 2, 3)
    with ThreadPoolExecutor(1) as pool:
        for number in numbers[:2]:
            made.reset(tmp_path / str(number))
            pool.submit(save, state(number), tmp_path, made).result()
    made.reset(tmp_path / "3")
    begin(state(3), made).result()
    assert all(equal(loaded(tmp_path / str(number)), state(number)) for number in numbers)
    assert not (tmp_path / "a").exists()
    assert pickle.loads(pickle.dumps(dcp.Writer())).path is None
