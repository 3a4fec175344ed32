"""Safetensors, in one file and in several: weights become a run, and bad headers and indexes are named."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model

import flashckpt
from flashckpt.errors import DamagedError, MismatchError, OptionError
from flashckpt.export.step import export
from flashckpt.importing.run import Mapped, import_checkpoint
from flashckpt.store import open_store
from tests.dcp.states import equal
from tests.importing.training import Training, is_free, trained


def sharded(folder: Path, tensors: dict[str, torch.Tensor], *, metadata: Any = None) -> Path:
    """A folder in the form of `save_pretrained`."""
    folder.mkdir()
    names = sorted(tensors)
    where = {name: f"model-0000{1 + place % 2}-of-00002.safetensors" for place, name in enumerate(names)}
    for file in sorted(set(where.values())):
        own = {name: tensors[name].contiguous() for name in names if where[name] == file}
        save_file(own, folder / file, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": metadata or {}, "weight_map": where}))
    return folder


@pytest.mark.process
def test_weights_of_tied_modules_from_a_folder(tmp_path: Path, runtime: Path) -> None:
    """Like `save_pretrained`, leave out one of two tied names."""
    source = trained()
    tensors = dict(source.model.state_dict())
    del tensors["head.weight"]
    done = import_checkpoint(sharded(tmp_path / "hf", tensors), tmp_path / "run", Mapped(step="4"))
    assert done.parts[0][:2] == ("model", len(tensors))
    training = Training.made(seed=5)
    with flashckpt.attach(tmp_path / "run", every=None, state=training.state) as checkpointer:
        assert checkpointer.completed == 4
    assert equal(training.model.state_dict(), source.model.state_dict())
    assert training.model.head.weight is training.model.embedding.weight


@pytest.mark.process
def test_one_tensor_in_the_live_model_and_two_in_the_file(tmp_path: Path, runtime: Path) -> None:
    source = trained()
    tensors = {name: tensor.clone() for name, tensor in source.model.state_dict().items()}
    save_file(tensors, tmp_path / "same.safetensors")
    import_checkpoint(tmp_path / "same.safetensors", tmp_path / "same")
    training = Training.made(seed=5)
    flashckpt.attach(tmp_path / "same", every=None, state=training.state).close()
    assert equal(training.model.state_dict(), source.model.state_dict())
    tensors["head.weight"][0, 0] += 1
    save_file(tensors, tmp_path / "other.safetensors")
    import_checkpoint(tmp_path / "other.safetensors", tmp_path / "other")
    with pytest.raises(MismatchError, match=r"head\.weight"):
        flashckpt.attach(tmp_path / "other", state=training.state)


def test_ties_in_the_metadata(tmp_path: Path) -> None:
    source = trained()
    save_model(source.model, str(tmp_path / "weights.safetensors"))
    import_checkpoint(tmp_path / "weights.safetensors", tmp_path / "run")
    assert equal(flashckpt.load(tmp_path / "run", only="model", strip=True), dict(source.model.state_dict()))


@pytest.mark.process
@pytest.mark.parametrize("aliases", ["no JSON", "[" * 100_000, "[1]", '{"x": [1]}', '{"x": "nowhere"}'])
def test_ties_that_cannot_be_read_are_left_out(aliases: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(2)}, path, metadata={"flashckpt.aliases": aliases})
    import_checkpoint(path, tmp_path / "run")
    assert torch.equal(flashckpt.load(tmp_path / "run", only="model")["model.w"], torch.ones(2))


def test_an_export_round_trips(tmp_path: Path, runtime: Path) -> None:
    """All names. Dtypes that safetensors lacks are refused."""
    source = trained()
    with flashckpt.attach(tmp_path / "first", every=None, state=source.state) as checkpointer:
        checkpointer.save()
    export(open_store(tmp_path / "first"), str(tmp_path / "out.safetensors"))
    import_checkpoint(
        tmp_path / "out.safetensors", tmp_path / "run", Mapped(state={"model": "model", "o": "optimizer"})
    )
    first, again = flashckpt.load(tmp_path / "first"), flashckpt.load(tmp_path / "run")
    left_out = ("gradients.", "model.mask")  # the mask is a buffer that is not persistent
    names = {name: name.replace("optimizer.", "o.") for name in first if not name.startswith(left_out)}
    assert equal(again, {now: first[name] for name, now in names.items()})
    file = tmp_path / "odd.safetensors"
    save_file({"w": torch.ones(8, dtype=torch.uint8)}, file, {"flashckpt.dtypes": '{"w": {}}'})
    with pytest.raises(OptionError, match="dtypes that safetensors lacks"):
        import_checkpoint(file, tmp_path / "other")
    assert is_free(tmp_path / "other")


def with_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


BAD_HEADERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a shape that is too large": lambda h: h["a"].update(shape=[1 << 62]),
    "a negative size": lambda h: h["a"].update(shape=[-4]),
    "an unknown dtype": lambda h: h["a"].update(dtype="F1"),
    "an offset behind the end": lambda h: h["b"].update(data_offsets=[16, 1 << 40]),
    "two in one place": lambda h: h["b"].update(data_offsets=[0, 16]),
    "a hole": lambda h: h.pop("a"),
    "no offsets": lambda h: h["a"].pop("data_offsets"),
    "a list": lambda h: h.update(a=[1]),
}


@pytest.mark.parametrize("bad", BAD_HEADERS)
def test_a_bad_header_is_named(bad: str, tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    save_file({"a": torch.arange(4.0), "b": torch.arange(4.0)}, file)
    with_header(file, BAD_HEADERS[bad])
    with pytest.raises(DamagedError, match=r"weights\.safetensors cannot be imported"):
        import_checkpoint(file, tmp_path / "run")
    assert is_free(tmp_path / "run")


def test_a_flipped_byte_of_the_header_and_a_truncated_file_are_named(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    save_file({"a": torch.arange(4.0), "b": torch.arange(4.0)}, file)
    data = file.read_bytes()
    flipped = [data[:place] + bytes([data[place] ^ 0x80]) + data[place + 1 :] for place in (0, 5, 9, 20, 60)]
    for bad in (*flipped, *(data[:length] for length in (0, 7, 40, -1))):
        file.write_bytes(bad)
        with pytest.raises(DamagedError, match=r"weights\.safetensors cannot be imported"):
            import_checkpoint(file, tmp_path / "run")


BAD_INDEXES: dict[str, Any] = {
    "a path out of the folder": {"a": "../secret.safetensors", "b": "../secret.safetensors"},
    "an absolute path": {"a": "/etc/passwd"},
    "a folder": {"a": "inner"},
    "a file that is missing": {"a": "model-00003-of-00002.safetensors"},
    "a tensor that is elsewhere": {"a": "model-00002-of-00002.safetensors"},
    "a tensor that it does not name": {"a": "model-00001-of-00002.safetensors"},
    "no files": {"a": 3},
    "nothing": {},
    "a list": [],
}


@pytest.mark.parametrize("bad", BAD_INDEXES)
def test_a_bad_index_is_named(bad: str, tmp_path: Path) -> None:
    tensors = {name: torch.arange(4.0) for name in "abc"}
    save_file(tensors, tmp_path / "secret.safetensors")
    folder = sharded(tmp_path / "hf", tensors)
    (folder / "inner").mkdir()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": BAD_INDEXES[bad]}))
    with pytest.raises(DamagedError, match=r"hf.* cannot be imported"):
        import_checkpoint(folder, tmp_path / "run")
    assert is_free(tmp_path / "run")


def test_a_folder_that_is_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="neither"):
        import_checkpoint(tmp_path, tmp_path / "run")
    for name in ("a", "b"):
        save_file({"x": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(OptionError, match="2 safetensors files and no index"):
        import_checkpoint(tmp_path, tmp_path / "run")
