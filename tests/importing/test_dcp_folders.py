"""A DCP folder becomes a run; a hostile one is refused by name and runs no code."""

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import flashckpt
from flashckpt.errors import DamagedError, OptionError
from flashckpt.importing.run import Mapped, import_checkpoint
from tests.importing.training import Reduced, check_goes_on, is_free, trained

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of its own calls


def saved(folder: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.process
@pytest.mark.parametrize("form", ["plain", "by names", "flat"])
def test_next_steps_are_those_of_the_source(form: str, tmp_path: Path, runtime: Path) -> None:
    """Parameters by number, as in torch's optimizers, and by name, as in DCP."""
    source = trained()
    state = source.state_dicts
    if form != "plain":
        options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
        state["model"], state["optimizer"] = get_state_dict(source.model, source.optimizer, options=options)
    folder = saved(tmp_path / "dcp", {**state, "done": 5})
    names = {name: name for name in source.state}
    done = import_checkpoint(folder, tmp_path / "run", Mapped(state=names, step="done"))
    assert (done.format, done.step, done.left_out) == ("dcp", 5, ())
    check_goes_on(tmp_path / "run", source)


def test_tensors_values_and_lists(tmp_path: Path) -> None:
    state = {
        "model": {"weight": torch.arange(6.0).reshape(2, 3), "empty": torch.empty(0, 3)},
        "own": {"list": [torch.ones(2), {"a": (1, 2.5, "x")}, 3], "numbers": {0: "a", 1: "b"}, "none": None},
        "half": torch.ones(3, dtype=torch.bfloat16),
    }
    import_checkpoint(saved(tmp_path / "dcp", state), tmp_path / "run")
    found = flashckpt.load(tmp_path / "run")
    assert found.keys() == {"model.weight", "model.empty", "own.list.0", "half"}
    assert torch.equal(found["model.weight"], state["model"]["weight"])
    assert torch.equal(found["half"], state["half"])


class Odd:
    pass


def test_values_that_need_code_are_named_and_skipped_on_demand(tmp_path: Path) -> None:
    folder = saved(tmp_path / "dcp", {"model": {"w": torch.ones(2)}, "odd": Odd(), "n": 1})
    with pytest.raises(OptionError, match=r"1 items cannot be imported:\n  odd is a .*test_dcp_folders\.Odd"):
        import_checkpoint(folder, tmp_path / "run")
    assert is_free(tmp_path / "run")
    done = import_checkpoint(folder, tmp_path / "run", Mapped(skip_unreadable=True))
    assert [name for name, *_ in done.parts] == ["model", "n"]


EVIL = {
    "posix.system": Reduced(os.system, ("touch was-run",)),
    "builtins.eval": Reduced(eval, ("open('was-run', 'w')",)),
    "builtins.getattr": Reduced(getattr, ("x", "y")),
}


@pytest.mark.parametrize("name", EVIL)
@pytest.mark.parametrize("where", ["whole", "inside", "item"])
def test_a_hostile_folder_is_refused_by_name(
    name: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    items = {"evil": EVIL[name]} if where == "item" else {}
    folder = saved(tmp_path / "dcp", {"model": {"w": torch.ones(2)}, **items})
    if where != "item":
        path = folder / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        metadata.storage_meta = EVIL[name]
        path.write_bytes(pickle.dumps(metadata if where == "inside" else EVIL[name]))
    with pytest.raises(DamagedError, match=rf"cannot be imported: (it|its pickle) names {name}"):
        import_checkpoint(folder, tmp_path / "run", Mapped(skip_unreadable=True))
    assert not (tmp_path / "was-run").exists()
    assert is_free(tmp_path / "run")


def first(metadata: Any) -> tuple[Any, Any]:
    """The key and the place of the tensor."""
    return next((index, info) for index, info in metadata.storage_data.items() if index.fqn == "w")


def two_in_one_place(metadata: Any) -> None:
    index, info = first(metadata)
    metadata.storage_data[MetadataIndex("w", (1, 0))] = info


CHANGES: dict[str, Callable[[Any], object]] = {
    "a path out of the folder": lambda m: setattr(first(m)[1], "relative_path", "../../etc/passwd"),
    "an absolute path": lambda m: setattr(first(m)[1], "relative_path", "/etc/passwd"),
    "a hidden folder": lambda m: setattr(first(m)[1], "relative_path", "."),
    "no text for a path": lambda m: setattr(first(m)[1], "relative_path", 3),
    "a length behind the end": lambda m: setattr(first(m)[1], "length", 1 << 50),
    "a shorter length": lambda m: setattr(first(m)[1], "length", first(m)[1].length - 64),
    "a negative offset": lambda m: setattr(first(m)[1], "offset", -1),
    "another item's place": lambda m: setattr(first(m)[1], "offset", 1),
    "no place": lambda m: m.storage_data.pop(first(m)[0]),
    "another shape": lambda m: setattr(m.state_dict_metadata["w"], "size", torch.Size([1 << 60, 3])),
    "a larger shape": lambda m: setattr(m.state_dict_metadata["w"], "size", torch.Size([4, 3])),
    "two pieces in one place": two_in_one_place,
    "no items": lambda m: setattr(m, "state_dict_metadata", None),
    "no storage": lambda m: setattr(m, "storage_data", [1]),
    "a path of a number": lambda m: m.planner_data.update(w=(1.5,)),
    "a list with gaps": lambda m: m.planner_data.update(w=("x", 7)),
    "a name twice": lambda m: m.planner_data.update(w=("n",)),
}


def doubled(value: Any) -> Any:
    """2**60 times one value, in 60 tuples."""
    for _ in range(60):
        value = (value, value)
    return value


@pytest.mark.long
def test_tuples_that_hold_each_other_many_times_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "dcp", {"w": torch.arange(6.0)})
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for descriptors, meta in ((doubled("zstd"), None), (None, Reduced(PurePath, (doubled("zstd"),)))):
        first(metadata)[1].transform_descriptors, metadata.storage_meta = descriptors, meta
        path.write_bytes(pickle.dumps(metadata))
        with pytest.raises(DamagedError, match=r"\.metadata cannot be imported: it holds more than"):
            import_checkpoint(folder, tmp_path / "run")
    assert is_free(tmp_path / "run")


@pytest.mark.parametrize("change", CHANGES)
def test_a_bad_metadata_is_named(change: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "dcp", {"w": torch.arange(6.0).reshape(2, 3), "n": [1]})
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    CHANGES[change](metadata)
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedError, match="cannot be imported"):
        import_checkpoint(folder, tmp_path / "run")
    assert is_free(tmp_path / "run")


@pytest.mark.parametrize("how", ["metadata cut", "metadata flipped", "data cut", "data flipped", "data gone"])
def test_a_damaged_folder_is_named(how: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "dcp", {"w": torch.arange(64.0)})
    path = folder / (".metadata" if how.startswith("metadata") else "__0_0.distcp")
    data = bytearray(path.read_bytes())
    if how.endswith("cut"):
        path.write_bytes(data[: len(data) // 2])
    elif how.endswith("gone"):
        path.unlink()
    else:
        place = data.index(torch.arange(64.0).numpy().tobytes()) if how.startswith("data") else 3
        data[place + 9] ^= 0x41
        path.write_bytes(data)
    with pytest.raises(DamagedError, match="cannot be imported"):
        import_checkpoint(folder, tmp_path / "run")
    assert is_free(tmp_path / "run")


def test_pieces_of_several_ranks(tmp_path: Path) -> None:
    """Two ranks write rows of one tensor to two files."""
    folder = saved(tmp_path / "dcp", {"w": torch.arange(6.0).reshape(2, 3)})
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    whole = torch.arange(12.0).reshape(4, 3)
    table = metadata.state_dict_metadata["w"]
    chunk = type(table.chunks[0])
    table.size = torch.Size([4, 3])
    table.chunks = [
        chunk(offsets=torch.Size([row, 0]), sizes=torch.Size([rows, 3])) for row, rows in ((0, 3), (3, 1))
    ]
    (_, info) = first(metadata)
    metadata.storage_data = {}
    for number, (row, rows) in enumerate(((0, 3), (3, 1))):
        data = io.BytesIO()
        torch.save(whole[row : row + rows].clone(), data)
        (folder / f"__{number}_0.distcp").write_bytes(b"some bytes before" + data.getvalue())
        place = type(info)(f"__{number}_0.distcp", len(b"some bytes before"), len(data.getvalue()))
        metadata.storage_data[MetadataIndex("w", (row, 0))] = place
    path.write_bytes(pickle.dumps(metadata))
    import_checkpoint(folder, tmp_path / "run", Mapped(state={"model": ""}))
    assert torch.equal(flashckpt.load(tmp_path / "run")["model.w"], whole)
