"""Any file of a run flipped, cut, missing or swapped: found before a byte reaches a tensor, and named."""

import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import flashckpt
from flashckpt.errors import FlashckptError
from flashckpt.store.local import LocalStore
from tests import run_view
from tests.processes import end, keepers_of
from tests.waiting import until

STEPS = [1, 2, 3]
MARKS = -1.0  # what a tensor holds before anything is loaded


def model_of(value: float) -> nn.Module:
    model = nn.Linear(40, 40)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three committed steps; in each, every weight is the step's number."""
    run, runtime = tmp_path_factory.mktemp("whole") / "run", tmp_path_factory.mktemp("runtime")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHCKPT_RUNTIME", str(runtime))
        model = model_of(0)
        with flashckpt.attach(run, every=None, persist_every=None, model=model) as checkpointer:
            for step in STEPS:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.fill_(step)
                checkpointer.step()
                checkpointer.save()
                checkpointer.wait()
        until(lambda: not keepers_of(runtime), "the keeper to leave")
        end(keepers_of(runtime))
    assert flashckpt.steps(run) == STEPS
    shutil.rmtree(run / "events")
    return run


def flip(path: Path, other: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def cut(path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def remove(path: Path, other: Path) -> None:
    path.unlink()


def swap(path: Path, other: Path) -> None:
    """The same file of the step before, whole as it is."""
    path.write_bytes(other.read_bytes())


def empty(path: Path, other: Path) -> None:
    path.write_bytes(b"")


DAMAGES: list[Callable[[Path, Path], None]] = [flip, cut, remove, swap]


def file_of(run: Path, step: int, kind: str) -> Path:
    """A file of a step: `manifest`, `node` (its part) or `rank` (its shard)."""
    [name] = [each for each in run_view.checkpoints(LocalStore(str(run))) if each.step == step]
    [found] = (run / run_view.folder_of(LocalStore(str(run)), name.id)).glob(f"{kind}-*")
    return found


@pytest.fixture
def run(whole: Path, tmp_path: Path, runtime: Path) -> Path:
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda each: each.__name__)
@pytest.mark.parametrize("kind", ["manifest", "node", "rank"])
def test_the_older_good_step_is_taken_and_the_damaged_file_named(
    kind: str, damage: Callable[[Path, Path], None], run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = file_of(run, 3, kind)
    damage(path, file_of(run, 2, kind))
    if path.exists() and kind != "manifest":
        assert [row.file for row in flashckpt.verify(run).damaged] != []
    with pytest.raises(FlashckptError):
        flashckpt.load(run, 3)

    model = model_of(MARKS)
    with caplog.at_level(logging.INFO), flashckpt.attach(run, every=None, model=model) as checkpointer:
        assert checkpointer.resumed.step == 2
        assert all(bool((p == 2).all()) for p in model.parameters())
    said = "passed over: step 3", "cannot resume from step 3"  # before the step is read, and while it is
    assert any(each in caplog.text for each in said)
    assert path.name in caplog.text


@pytest.mark.parametrize("damage", [*DAMAGES[:3], empty], ids=lambda each: each.__name__)
@pytest.mark.parametrize("which", ["the newest version", "all versions"])
def test_a_runs_state_is_never_guessed(which: str, damage: Callable[[Path, Path], None], run: Path) -> None:
    """Which step is the newest hangs on it: either it is the same without it, or nothing is loaded."""
    versions = sorted(run.glob("catalogue/*"))
    for path in versions if which == "all versions" else versions[-1:]:
        damage(path, path)
    model, refusal = model_of(MARKS), ""
    try:
        with flashckpt.attach(run, every=None, model=model) as checkpointer:
            assert checkpointer.resumed is not None, "a damaged run is not taken for a fresh one"
            assert checkpointer.resumed.step == 3
    except FlashckptError as error:
        refusal = str(error)
    if refusal:
        assert "catalogue/" in refusal
        assert damage is remove or versions[-1].name in refusal
        assert all(bool((p == MARKS).all()) for p in model.parameters())


BOMBS = {
    "a manifest of a gigabyte": ("manifest", lambda path: _grow(path, 1 << 30)),
    "a part of a gigabyte": ("node", lambda path: _grow(path, 1 << 30)),
    "a shard of a terabyte": ("rank", lambda path: _grow(path, 1 << 40)),
    "a header of an exabyte": ("rank", lambda path: _write(path, (1 << 60).to_bytes(8, "little"))),
    "a part of brackets": ("node", lambda path: path.write_bytes(b'{"format":1,"a":' + b"[" * (8 << 20))),
    "a part of digits": ("node", lambda path: path.write_bytes(b'{"format":1,"a":' + b"9" * (8 << 20))),
    "a part that is a pipe": ("node", lambda path: _pipe(path)),
    "a part that is a folder": ("node", lambda path: _folder(path)),
    "a shard that is a link": ("rank", lambda path: _link(path, Path("/dev/zero"))),
    "a manifest that is a link": ("manifest", lambda path: _link(path, Path("/dev/zero"))),
}
_MOST_BYTES = 1 << 30
_PROGRAM = """
import resource, sys, flashckpt
flashckpt.Report  # its module is imported before memory is limited
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]), int(sys.argv[2])))
resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
report = flashckpt.verify(sys.argv[1])
print(",".join(sorted({str(row.step) for row in report.damaged})), flashckpt.steps(sys.argv[1])[0])
"""


def verified(run: Path) -> subprocess.CompletedProcess[str]:
    """The end of a process of little memory and time that verifies a run."""
    command = [sys.executable, "-c", _PROGRAM, str(run), str(_MOST_BYTES)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _grow(path: Path, num_bytes: int) -> None:
    with open(path, "r+b") as file:
        file.truncate(num_bytes)


def _write(path: Path, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.write(data)


def _pipe(path: Path) -> None:
    path.unlink()
    subprocess.run(["mkfifo", path], check=True)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _link(path: Path, target: Path) -> None:
    path.unlink()
    path.symlink_to(target)


@pytest.mark.parametrize("bomb", BOMBS)
def test_hostile_files_end_in_bounded_time_and_memory(bomb: str, run: Path) -> None:
    """Nothing is compressed in this format, so nothing can grow by being read; what can lie is a length."""
    kind, plant = BOMBS[bomb]
    plant(file_of(run, 3, kind))
    found = verified(run)
    assert found.returncode == 0, found.stderr
    damaged, oldest = found.stdout.split(" ")
    assert damaged == "3", "no other step is blamed"
    assert int(oldest) == 1


@pytest.mark.parametrize("bomb", ["a part of a gigabyte", "a part of brackets", "a part of digits"])
def test_a_hostile_catalogue_ends_in_bounded_time_and_memory(bomb: str, run: Path) -> None:
    newest = sorted(run.glob("catalogue/*"))[-1]
    BOMBS[bomb][1](newest)
    found = verified(run)
    assert found.returncode == 1
    assert "DamagedError" in found.stderr.splitlines()[-1], found.stderr
    assert newest.name in found.stderr


@pytest.mark.parametrize(
    "bomb", ["a part that is a pipe", "a part that is a folder", "a manifest that is a link"]
)
def test_a_version_that_is_no_file_is_neither_read_nor_replaced(bomb: str, run: Path) -> None:
    newest = sorted(run.glob("catalogue/*"))[-1]
    BOMBS[bomb][1](newest)
    assert flashckpt.steps(run) == STEPS
    with pytest.raises(FlashckptError, match=newest.name):
        flashckpt.attach(run, every=None, model=model_of(MARKS))
    assert newest.is_symlink() or newest.is_fifo() or newest.is_dir()
