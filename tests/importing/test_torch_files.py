"""A file of torch.save becomes a run, whose next steps equal those after torch's own load."""

import argparse
import io
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flashckpt
from flashckpt.cli.command import ExitCode
from flashckpt.errors import DamagedError, MismatchError, OptionError, RunError
from flashckpt.importing.run import Mapped, import_checkpoint
from flashckpt.importing.source import Unreadable, open_source
from tests.contracts.test_recover_contract import shell
from tests.dcp.states import equal
from tests.importing.training import Reduced, Training, check_goes_on, is_free, seed_all, trained

pytestmark = pytest.mark.process


def saved(path: Path, value: Any, **how: Any) -> Path:
    torch.save(value, path, **how)
    return path


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_next_steps_are_those_of_the_source(kind: str, tmp_path: Path, runtime: Path) -> None:
    source = trained(kind=kind)
    file = saved(tmp_path / "last.pt", {**source.state_dicts, "step": 5, "epoch": 2})
    done = import_checkpoint(file, tmp_path / "run", Mapped(step="step", epoch="epoch"))
    assert (done.step, done.skipped, done.left_out) == (5, (), ())
    assert flashckpt.steps(tmp_path / "run") == [5]
    assert flashckpt.verify(tmp_path / "run").ok
    weights = flashckpt.load(tmp_path / "run", only="model", strip=True)
    assert equal(weights, dict(source.model.state_dict()))
    check_goes_on(tmp_path / "run", source, kind=kind)
    assert flashckpt.steps(tmp_path / "run") == [5, 8]


def test_next_steps_of_an_epoch_loop(tmp_path: Path, runtime: Path) -> None:
    source = trained()
    state = {**source.state_dicts, "step": torch.tensor(6.0), "done": {"epochs": 2}}
    names = {name: name for name in source.state_dicts}
    mapped = Mapped(state=names, step="step", epoch="done.epochs")
    import_checkpoint(saved(tmp_path / "last.pt", state), tmp_path / "run", mapped)
    training = Training.made(seed=3)
    seen = []
    with flashckpt.attach(tmp_path / "run", every=None, state=training.state) as checkpointer:
        for epoch in checkpointer.epochs(4):
            for batch in checkpointer.batches([0, 1]):
                seen.append((epoch, batch))
                training.step()
        assert checkpointer.completed == 10
    assert seen == [(2, 0), (2, 1), (3, 0), (3, 1)]


def test_random_numbers_of_the_source(tmp_path: Path, runtime: Path) -> None:
    source = trained()
    numbers = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    file = saved(tmp_path / "last.pt", {**source.state_dicts, "numbers": numbers})
    names = {name: name for name in source.state_dicts}
    import_checkpoint(
        file, tmp_path / "run", Mapped(state=names, rng={name: f"numbers.{name}" for name in numbers})
    )
    expected = [source.step(), random.random(), np.random.random()]
    training = Training.made(seed=3)
    seed_all(8)
    with flashckpt.attach(tmp_path / "run", every=None, state=training.state) as checkpointer:
        assert [
            [training.step(), random.random(), np.random.random()] for _ in checkpointer.batches([0])
        ] == [expected]


def test_parts_under_other_names_and_missing_parts(
    tmp_path: Path, runtime: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights of a wrapped module without an optimizer, a best value, and an unused key."""
    source = trained()
    wrapped = {f"_orig_mod.module.{key}": value for key, value in source.model.state_dict().items()}
    file = saved(tmp_path / "last.pt", {"net": wrapped, "best": 0.25, "config": {"a": 1}})
    done = import_checkpoint(
        file, tmp_path / "run", Mapped(state={"model": "net", "own.best": "best"}, step="3")
    )
    assert done.left_out == ("config",)
    training, own = Training.made(seed=4), {"best": 0.0}
    before = training.optimizer.state_dict()
    with flashckpt.attach(tmp_path / "run", every=None, state={**training.state, "own": own}) as checkpointer:
        assert checkpointer.completed == 3
    assert equal(training.model.state_dict(), source.model.state_dict())
    assert own == {"best": 0.25}
    assert equal(training.optimizer.state_dict(), before)
    assert "the import has no optimizer, scheduler: the program's own is kept as it is" in caplog.text


def test_every_key_is_taken_and_a_number_needs_no_name(tmp_path: Path, runtime: Path) -> None:
    source = trained()
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    average = {"shadow": [torch.arange(3.0)], "decay": 0.9}
    file = saved(
        tmp_path / "last.pt",
        {**source.state_dicts, "scaler": scaler.state_dict(), "average": average, "step": 5},
    )
    import_checkpoint(file, tmp_path / "run", Mapped(step="step"))
    other, held = torch.amp.GradScaler("cpu"), {"shadow": [torch.zeros(3)], "decay": 0.0}
    check_goes_on(tmp_path / "run", source, scaler=other, average=held)
    assert other.state_dict() == scaler.state_dict()
    assert equal(held, average)


def test_a_scheduler_of_an_older_torch(tmp_path: Path, runtime: Path) -> None:
    """Its state lacks a newer attribute, which keeps its value, as with torch."""
    source = trained()
    state = source.state_dicts
    state["scheduler"]["of_before"] = state["scheduler"].pop("total_steps")
    import_checkpoint(saved(tmp_path / "last.pt", state), tmp_path / "run")
    training = Training.made(seed=4)
    with flashckpt.attach(tmp_path / "run", every=None, state=training.state):
        assert training.scheduler.state_dict()["total_steps"] == 100
        assert training.scheduler.last_epoch == source.scheduler.last_epoch


def test_what_does_not_fit_the_training_is_a_mismatch(tmp_path: Path, runtime: Path) -> None:
    """Another model, another optimizer, an optimizer without its module; nothing is changed."""
    source, training = trained(), Training.made(seed=4)
    before = training.state_dicts

    def mismatch(name: str, values: dict[str, Any], live: Training, match: str, **mapped: Any) -> Any:
        import_checkpoint(saved(tmp_path / f"{name}.pt", values), tmp_path / name, Mapped(**mapped))
        with pytest.raises(MismatchError, match=match) as found:
            flashckpt.attach(tmp_path / name, state=live.state)
        return found.value.differences

    state = source.state_dicts
    mismatch(
        "module", state, training, r"has optimizer, and not .* of its parameters",
        state={"optimizer": "optimizer"},
    )  # fmt: skip
    other = Training.made(seed=4)
    other.optimizer = torch.optim.AdamW(other.model.parameters())
    other.scheduler = torch.optim.lr_scheduler.OneCycleLR(other.optimizer, 1e-2, total_steps=100)
    mismatch("optimizer", state, other, r"optimizer\.groups")
    state["model"]["extra.weight"] = state["model"].pop("unused")
    differences = mismatch("model", state, training, r"model\.extra\.weight")
    assert {row[0] for row in differences} == {"model.extra.weight", "model.unused"}
    assert equal(training.state_dicts, before)


def test_values_that_need_code_are_named_and_skipped_on_demand(tmp_path: Path) -> None:
    value = {
        "model": {"weight": torch.ones(2)},
        "args": argparse.Namespace(a=1),
        "log": {"path": Path("x"), "rows": [1, 2], "parts": [{"cls": argparse.Namespace, "n": 1}]},
        "sparse": {"s": torch.eye(2).to_sparse()},
    }
    file = saved(tmp_path / "last.pt", value)
    with pytest.raises(OptionError) as found:
        import_checkpoint(file, tmp_path / "run")
    message = str(found.value)
    assert "4 items cannot be imported" in message
    for path in ("args is a argparse.Namespace", "log.path", "log.parts.0.cls is argparse", "sparse.s has"):
        assert path in message
    assert is_free(tmp_path / "run")
    done = import_checkpoint(file, tmp_path / "run", Mapped(skip_unreadable=True))
    assert len(done.skipped) == 4
    assert [name for name, *_ in done.parts] == ["model", "log", "sparse"]


def test_half_precision_and_files_of_old_versions_of_torch(tmp_path: Path) -> None:
    value = {"model": {"weight": torch.arange(4, dtype=torch.bfloat16).reshape(2, 2).t()}}
    file = saved(tmp_path / "old.pt", value, _use_new_zipfile_serialization=False)
    with pytest.raises(DamagedError, match=r"it is no archive, as torch\.save writes them since torch 1\.6"):
        import_checkpoint(file, tmp_path / "run")
    import_checkpoint(saved(tmp_path / "new.pt", value), tmp_path / "run")
    assert equal(flashckpt.load(tmp_path / "run"), {"model.weight": value["model"]["weight"]})


def test_a_hostile_file_is_refused_by_name(tmp_path: Path) -> None:
    evil = Reduced(open, (str(tmp_path / "was-here"), "w"))
    file = saved(tmp_path / "evil.pt", {"model": {"w": torch.ones(2)}, "x": evil})
    with pytest.raises(DamagedError, match=r"its pickle names io\.open"):
        import_checkpoint(file, tmp_path / "run", Mapped(skip_unreadable=True))
    assert not (tmp_path / "was-here").exists()
    assert is_free(tmp_path / "run")


@pytest.mark.long
def test_lists_that_hold_each_other_many_times_are_refused(tmp_path: Path) -> None:
    """2**60 numbers from one."""
    value: list[Any] = [1]
    for _ in range(60):
        value = [value, value]
    file = saved(tmp_path / "bomb.pt", {"model": {"w": torch.ones(2)}, "x": value})
    with pytest.raises(DamagedError, match=r"bomb\.pt cannot be imported: it holds more than"):
        import_checkpoint(file, tmp_path / "run", Mapped(skip_unreadable=True))
    assert is_free(tmp_path / "run")


def test_numpy_follows_no_address_of_a_file(tmp_path: Path) -> None:
    """NumPy itself would take eight bytes of the file for the address of an object."""
    objects = Reduced(np.ndarray, ((1,), np.dtype("O"), b"A" * 8))
    saved(tmp_path / "evil.pt", {"model": {"w": torch.ones(2)}, "x": Reduced(np.ndarray, (objects,))})
    ended = shell("import", tmp_path / "evil.pt", tmp_path / "run")
    assert ended.returncode == ExitCode.USAGE, ended.stderr
    assert "x is a numpy.ndarray, which cannot be read without its code" in " ".join(ended.stderr.split())


def test_values_of_numpy(tmp_path: Path) -> None:
    kinds = ["<f4", "<f8", "<i8", "|u1", "|b1", ">i4", "<c16"]
    given: dict[str, Any] = {kind: np.arange(6).astype(kind).reshape(2, 3) for kind in kinds}
    given |= {"fortran": np.asfortranarray(given["<f4"]), "none": np.zeros((0, 3)), "one": np.float32(0.1)}
    saved(tmp_path / "last.pt", {"log": given, "dates": np.zeros(2, "M8[ns]")})
    tree = open_source(tmp_path / "last.pt").tree
    assert tree["log"].keys() == given.keys()
    for name, value in given.items():
        found = tree["log"][name]
        assert type(found) is type(value)
        assert found.dtype == value.dtype
        assert np.array_equal(found, value)
    assert tree["log"]["fortran"].flags.f_contiguous
    assert type(tree["dates"]) is Unreadable
    saved(tmp_path / "own.pt", Named(a=1))
    with pytest.raises(DamagedError, match="Can only SETITEM for dict"):
        open_source(tmp_path / "own.pt")


class Named(dict[str, Any]):
    """Like EasyDict and others, which torch reads only as a placeholder."""


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    file = saved(tmp_path / "last.pt", {"model": {"weight": torch.arange(64.0)}})
    data = file.read_bytes()
    flipped = bytearray(data)
    flipped[data.index(torch.arange(64.0).numpy().tobytes()) + 17] ^= 1
    listed, deflated = io.BytesIO(), io.BytesIO()
    torch.save([torch.ones(2)], listed)
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(deflated, "w") as new:
        for record in old.infolist():
            new.writestr(record.filename, old.read(record), zipfile.ZIP_DEFLATED)
    for bad in (data[:-200], flipped, listed.getvalue(), deflated.getvalue(), b"weights, honestly" * 10):
        file.write_bytes(bad)
        with pytest.raises(DamagedError, match=r"last\.pt cannot be imported"):
            import_checkpoint(file, tmp_path / "run")
        assert is_free(tmp_path / "run")


def test_wrong_usage(tmp_path: Path) -> None:
    kind, key, _, *gauss = np.random.RandomState(1).get_state()
    bad = {"above": (key, 625), "below": (key, -1), "cut": (key[:9], 3)}
    numpys = {name: (kind, *each, *gauss) for name, each in bad.items()}
    data = {"model": {"weight": torch.ones(2)}, "step": 1.5, "text": "x", **numpys}
    file = saved(tmp_path / "last.pt", data)
    for mapped, why in (
        (Mapped(state={"model": "net"}), r"has no 'net'"),
        (Mapped(step="step"), r"--step step"),
        (Mapped(step="steps"), r"has no 'steps'"),
        (Mapped(state={"text": "text"}), r"the chosen parts have no tensor"),
        (Mapped(state={"gradients": "model"}), r"cannot be the name of a part"),
        (Mapped(rng={"torch": "text"}), r"not a state of the torch generator"),
        *((Mapped(rng={"numpy": name}), r"not a state of the numpy generator") for name in numpys),
        (Mapped(state={"a": "model", "a.weight": "step"}), r"a is already taken as a whole"),
    ):
        with pytest.raises(OptionError, match=why):
            import_checkpoint(file, tmp_path / "run", mapped)
    for missing in ("nothing.pt", "."):
        with pytest.raises(OptionError):
            import_checkpoint(tmp_path / missing, tmp_path / "run")
    assert is_free(tmp_path / "run")
    import_checkpoint(file, tmp_path / "run")
    with pytest.raises(RunError, match="is a run already"):
        import_checkpoint(file, tmp_path / "run")
    assert flashckpt.steps(tmp_path / "run") == [0]
