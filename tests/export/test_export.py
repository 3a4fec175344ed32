"""Standard libraries read exported weights, which equal the captured ones bit for bit."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import flashckpt
from flashckpt.errors import DamagedError, NoSuchStepError, OptionError
from flashckpt.export.formats import INDEX
from flashckpt.export.step import LIST, export
from flashckpt.format.names import SnapshotId
from flashckpt.restore.step_tensors import transient_names
from flashckpt.store import open_store
from flashckpt.store.local import LocalStore
from tests import run_view
from tests.commit.runs import attempt_at, leaves_of, new_run, publish
from tests.dcp.states import equal
from tests.folders import flip
from tests.memory.mounts import small_tmpfs
from tests.processes import end, keepers_of
from tests.recovery.scene import whole_tree

ROOT = Path(__file__).parents[2]


class Net(nn.Module):
    """A tie, an odd stride, a scalar, an empty tensor, and dtypes that safetensors has and has not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.outer = nn.Linear(5, 7, bias=False)
        self.outer.weight = self.embed.weight
        self.register_buffer("turned", torch.arange(12.0).view(3, 4).t())
        self.register_buffer("scalar", torch.tensor(3, dtype=torch.int64))
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("bf16", torch.randn(3).to(torch.bfloat16))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("wave", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("table", torch.arange(2048.0), persistent=False)
        self.register_buffer("mean", torch.arange(2048.0))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Net]:
    """A run of two committed steps of a model and its optimizer, and the model. No test changes them."""
    torch.manual_seed(3)
    model, folder = Net(), tmp_path_factory.mktemp("made") / "run"
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(dir="/dev/shm") as runtime:
        patch.setenv("FLASHCKPT_RUNTIME", runtime)
        with flashckpt.attach(folder, every=None, persist_every=None, state=state) as job:
            for _ in range(2):
                model.outer(model.embed.weight).sum().backward()
                state["optimizer"].step()
                state["optimizer"].zero_grad()
                job.step()
                job.save()
                job.wait()
        end(keepers_of(Path(runtime)))
    return folder, model


@pytest.fixture
def run(made: tuple[Path, Net], runtime: Path) -> Path:
    return made[0]


@pytest.fixture
def model(made: tuple[Path, Net]) -> Net:
    return made[1]


def read(path: Path, format: str) -> dict[str, torch.Tensor]:
    return load_file(path) if format == "safetensors" else torch.load(path, weights_only=True)


def test_safetensors_opens_with_the_stock_library(run: Path, model: Net, tmp_path: Path) -> None:
    out = tmp_path / "weights.safetensors"
    done = export(open_store(run), str(out))
    loaded, state = load_file(out), flashckpt.load(run)
    with safe_open(out, "pt") as file:
        metadata = file.metadata()
    aliases, dtypes = json.loads(metadata["flashckpt.aliases"]), json.loads(metadata["flashckpt.dtypes"])
    assert metadata["format"] == "pt"
    assert (metadata["flashckpt.step"], metadata["flashckpt.attempt"]) == (str(done.step), str(done.attempt))
    del state["model.table"]  # a buffer that is not persistent
    assert set(loaded) | set(aliases) == set(state)
    assert {*aliases, *aliases.values()} == {"model.outer.weight", "model.embed.weight"}
    for name, tensor in state.items():
        stored = loaded[aliases.get(name, name)]
        if name in dtypes:
            assert name == "model.wave"
            stored = stored.view(getattr(torch, dtypes[name]["dtype"])).view(dtypes[name]["shape"])
        assert equal(stored, tensor), name
    assert equal(loaded["model.turned"], model.turned)


def test_torch_opens_with_weights_only(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "weights.pt"
    export(open_store(run), str(out), format="torch")
    loaded, state = torch.load(out, weights_only=True), flashckpt.load(run)
    del state["model.table"]
    assert equal(loaded, state)
    assert loaded["model.embed.weight"].data_ptr() == loaded["model.outer.weight"].data_ptr()


def test_a_module_takes_its_export_strictly(run: Path, model: Net, tmp_path: Path) -> None:
    export(open_store(run), str(tmp_path / "model.pt"), format="torch", only=["model"])
    fresh = Net()
    fresh.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True), strict=True)
    assert equal(fresh.state_dict(), model.state_dict())
    export(open_store(run), str(tmp_path / "part"), only=["model.embed"])
    assert set(load_file(tmp_path / "part")) == {"weight"}
    export(open_store(run), str(tmp_path / "several"), only=["model.embed", "model.mask"])
    assert set(load_file(tmp_path / "several")) == {"model.embed.weight", "model.mask"}
    export(open_store(run), str(tmp_path / "tie"), only=["model.outer.weight"])
    assert set(load_file(tmp_path / "tie")) == {"model.outer.weight"}, "under the name that was asked for"


def test_a_cast_changes_floating_point_tensors_alone(run: Path, model: Net, tmp_path: Path) -> None:
    for format in ("safetensors", "torch"):
        out = tmp_path / format
        export(open_store(run), str(out), format=format, only=["model"], dtype="bf16")
        found = read(out, format)
        for name, each in model.state_dict().items():
            if name not in ("wave", "outer.weight") and (name in found or format == "torch"):
                assert equal(found[name], each.bfloat16() if each.is_floating_point() else each), name
        assert found["scalar"].dtype == torch.int64
    export(open_store(run), str(tmp_path / "object"), dtype=torch.float16, only=["model.mean"])
    assert load_file(tmp_path / "object")["model.mean"].dtype == torch.float16


def test_shards_have_an_index(run: Path, tmp_path: Path) -> None:
    export(open_store(run), str(tmp_path / "whole"), only=["model"])
    done = export(open_store(run), str(tmp_path / "out"), only=["model"], max_shard_size="200B")
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    whole = load_file(tmp_path / "whole")
    assert index["weight_map"].keys() == whole.keys()
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in whole.values())
    names = {name for name, _ in done.files if name != INDEX}
    assert set(index["weight_map"].values()) == names
    assert len(names) > 1
    for file in names:
        held = load_file(tmp_path / "out" / file)
        filled = [each.nbytes for each in held.values() if each.nbytes]
        assert len(filled) == 1 or sum(filled) <= 200
        assert all(equal(each, whole[name]) for name, each in held.items())
    export(open_store(run), str(tmp_path / "one"), only=["model"], max_shard_size="1GiB")
    assert sorted(os.listdir(tmp_path / "one")) == [LIST, "model.safetensors"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_is_read_by_torch(run: Path, model: Net, tmp_path: Path) -> None:
    export(open_store(run), str(tmp_path / "dcp"), format="dcp", only=["model"])
    expected, found = model.state_dict(), Net().state_dict()
    torch_dcp.load(found, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert equal(found, expected)


def test_a_folder_that_is_not_empty_is_not_replaced(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    export(open_store(run), str(out), only=["model"], format="dcp")
    before = whole_tree(out)
    with pytest.raises(OptionError, match="is not empty. Nothing was written"):
        export(open_store(run), str(out), only=["model"], format="dcp")
    assert whole_tree(out) == before
    export(open_store(run), str(out), only=["model"], format="dcp", force=True)
    assert whole_tree(out) != before


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"format": "torch", "max_shard_size": "1GB"}, "Nothing was written"),
    ({"format": "dcp", "max_shard_size": "1GB"}, "Nothing was written"),
    ({"format": "dcp", "by_rank": True}, "Nothing was written"),
    ({"max_shard_size": "large"}, "Nothing was written"),
    ({"max_shard_size": 0}, "Nothing was written"),
    ({"dtype": "int8"}, "dtype='int8' is not supported"),
    ({"format": "onnx"}, "one of"),
    ({"only": ["modle"]}, "It has: model, optimizer"),
    ({"step": 77}, "no visible committed step 77"),
]


def test_what_cannot_be_is_refused_and_nothing_is_written(run: Path, tmp_path: Path) -> None:
    for options, said in REFUSED:
        with pytest.raises((OptionError, NoSuchStepError), match=said):
            export(open_store(run), str(tmp_path / "out"), **options)
    with pytest.raises(OptionError, match="not a folder"):
        export(open_store(run), str(tmp_path / "nowhere" / "out"))
    assert list(tmp_path.glob("*out*")) == list(tmp_path.glob("nowhere")) == []


def test_a_step_that_is_named(run: Path, tmp_path: Path) -> None:
    for step in flashckpt.steps(run):
        export(open_store(run), str(tmp_path / f"{step}"), step=step)
        found = load_file(tmp_path / f"{step}")["optimizer.state.model.embed.weight.step"]
        assert equal(found, torch.tensor(float(step)))


def test_a_flipped_bit_of_any_tensor_leaves_no_file(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    store, flipped = open_store(tmp_path / "run"), 0
    record = run_view.read(store, run_view.resumed(store))
    before = sorted(tmp_path.rglob("*"))
    for path, contents in record.files(0):
        layout = contents.layout()
        for leaf in layout.leaves:
            if not leaf.num_bytes or leaf.name in transient_names(record):
                continue
            file, place = tmp_path / "run" / path, layout.data_start + leaf.offset + leaf.num_bytes - 1
            flip(file, place)
            for format in ("safetensors", "torch", "dcp"):
                with pytest.raises(DamagedError, match=r"checksum.*No damaged byte was .*written"):
                    export(store, str(tmp_path / "out"), format=format)
            flip(file, place)
            assert sorted(tmp_path.rglob("*")) == before
            flipped += 1
    assert flipped >= 10
    export(store, str(tmp_path / "out"))


def test_existing_files_are_not_replaced(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("another's")
    with pytest.raises(OptionError, match="--force"):
        export(open_store(run), str(out))
    assert out.read_text() == "another's"
    export(open_store(run), str(out), force=True)
    assert load_file(out)


def several_ranks(folder: Path) -> LocalStore:
    store = new_run(folder)
    name = attempt_at(store, world=2)
    publish(store, 5, name, ranks=(0,), world=2, node=0, constants=True)
    publish(store, 5, name, ranks=(1,), world=2, node=1, constants=True)
    run_view.commit(store, SnapshotId(name, 5))
    return store


@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_several_ranks_give_a_folder_by_rank(tmp_path: Path, format: str) -> None:
    store = several_ranks(tmp_path / "run")
    out = tmp_path / "out"
    for force in (False, True):
        done = export(store, str(out), format=format, force=force, by_rank=True)
        suffix = {"safetensors": "safetensors", "torch": "pt"}[format]
        assert [name for name, _ in done.files] == [f"rank-0000{rank}.{suffix}" for rank in (0, 1)]
        assert sorted(os.listdir(out)) == [LIST, *(name for name, _ in done.files)]
        for rank, (name, num_bytes) in enumerate(done.files):
            assert (out / name).stat().st_size == num_bytes
            loaded = read(out / name, format)
            expected = {key: torch.from_numpy(each) for key, each in leaves_of(5, rank).items()}
            expected["frozen.weight"] = torch.arange(8, dtype=torch.float64) + rank
            assert equal(loaded, expected)


@pytest.mark.parametrize("out", ["models", "run", "run/weights", "run/attempts", ".", "link"])
def test_force_deletes_nothing_but_an_earlier_export(tmp_path: Path, out: str) -> None:
    store = new_run(tmp_path / "here" / "run")
    name = attempt_at(store)
    publish(store, 5, name)
    run_view.commit(store, SnapshotId(name, 5))
    models = tmp_path / "here" / "models"
    models.mkdir()
    (models / "rank-00000.safetensors").write_text("an export")
    (models / LIST).write_text('{"files": {"rank-00000.safetensors": 9}}')
    (models / "notes").write_text("weeks of work")
    (tmp_path / "here" / "link").symlink_to("run")
    before = whole_tree(tmp_path)
    with pytest.raises(OptionError, match=r"Nothing was written or deleted"):
        export(store, str(tmp_path / "here" / out), force=True)
    assert whole_tree(tmp_path) == before
    (models / "notes").unlink()
    export(store, str(models), force=True)
    assert load_file(models)


@pytest.mark.process
@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
def test_a_kill_while_a_folder_is_replaced_loses_neither(tmp_path: Path, is_first: bool) -> None:
    store = several_ranks(tmp_path / "run")
    home = tmp_path / "home"
    home.mkdir()
    export(store, str(home / "out"), by_rank=True)
    program = """
import os, sys
from flashckpt.export import step as step_export
from flashckpt.store import open_store
rename = os.rename
def dying(old, new, **how):
    if new == sys.argv[2]:
        if sys.argv[3] == "False":
            rename(old, new, **how)
        os.kill(os.getpid(), 9)
    return rename(old, new, **how)
os.rename = os.replace = dying
step_export.export(open_store(sys.argv[1]), sys.argv[2], by_rank=True, force=True)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "run"), str(home / "out"), str(is_first)]
    assert subprocess.run(command, cwd=ROOT).returncode == -signal.SIGKILL
    whole = [sorted(os.listdir(each)) for each in home.iterdir()]
    assert whole == [[LIST, "rank-00000.safetensors", "rank-00001.safetensors"]] * 2
    assert all(load_file(file) for file in home.glob("*/rank-*"))


KILLED = """
import json, sys
from flashckpt.export.step import export
from flashckpt.store import open_store
def progress(done, total):
    if done > int(sys.argv[3]) * total // 100 and sys.stdin:
        print("writing", flush=True)
        sys.stdin.readline()
export(open_store(sys.argv[1]), sys.argv[2], progress=progress, **json.loads(sys.argv[4]))
"""
WAYS: dict[str, dict[str, Any]] = {
    "safetensors": {},
    "sharded": {"only": ["model"], "max_shard_size": 200},
    "cast": {"only": ["model"], "dtype": "bf16", "format": "torch"},
    "dcp": {"format": "dcp"},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_kill_during_a_write_leaves_no_file_of_that_name(tmp_path: Path, run: Path, way: str) -> None:
    out = tmp_path / "here" / "out"
    out.parent.mkdir()
    for percent in (0, 99):
        command = [sys.executable, "-c", KILLED, str(run), str(out), str(percent), json.dumps(WAYS[way])]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert child.stdout.readline() == "writing\n"
        child.send_signal(signal.SIGKILL)
        child.communicate()
        assert not out.exists()
        assert [*out.parent.glob(".out.*.tmp")] == [*out.parent.iterdir()]
    export(open_store(run), str(out), **WAYS[way])
    assert out.exists()


def test_a_full_disk_leaves_nothing(run: Path) -> None:
    for options in WAYS.values():
        with small_tmpfs(4096) as disk:
            try:
                with pytest.raises(OSError, match="No space left"):
                    export(open_store(run), str(disk / "out"), **options)
            finally:
                left = os.listdir(disk)
        assert left == []


def test_the_shell_needs_no_torch_for_safetensors(tmp_path: Path, run: Path) -> None:
    program = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['flashckpt', *sys.argv[1:]]; "
        "from flashckpt.cli.main import main; main()"
    )
    command = [sys.executable, "-c", program, "export", str(run), str(tmp_path / "out"), "--json"]
    done = subprocess.run([*command, "--only", "model"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert set(told) == {"run", "step", "attempt", "out", "format", "leaves", "files"}
    assert told["leaves"] == len(load_file(tmp_path / "out"))
