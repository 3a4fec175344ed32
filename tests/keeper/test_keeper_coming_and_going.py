"""One keeper a run, nobody's child, small; it leaves when it should and leaves nothing behind."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flashckpt.format.layout import PAGE
from flashckpt.memory.region import is_region_name
from flashckpt.memory.runtime import RuntimeFolder
from tests.conftest import keepers_of
from tests.events import ledger
from tests.keeper.driver import (
    ROOT,
    Process,
    begun,
    begun_process,
    committed,
    eventually,
    runtime_of,
    saved,
    the_keeper,
)
from tests.keeper.fake import FakeTrainer, keeper_pid
from tests.zygote.keepers import ADDRESS


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper is started as users start it, and not forked."""
    monkeypatch.delenv(ADDRESS, raising=False)


@pytest.mark.usefixtures("started")
def test_the_keeper_is_nobodys_child_and_holds_nothing_of_its_starter(run: Path, runtime: Path) -> None:
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    try:
        trainer = FakeTrainer(run, runtime)
    finally:
        os.sched_setaffinity(0, range(4096))
    pid = the_keeper(trainer.folder)
    os.close(writing)
    # Were the keeper to hold the pipe's other end, `train | tee` would never end.
    assert os.read(reading, 1) == b""
    os.close(reading)
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    parent, session = int(fields[1]), int(fields[3])
    assert parent != os.getpid()
    assert session not in (os.getsid(0), pid)
    assert int(fields[16]) >= 5
    assert os.sched_getaffinity(pid) == os.sched_getaffinity(0)
    for stream in (1, 2):
        assert os.readlink(f"/proc/{pid}/fd/{stream}").endswith("keeper.log")
    assert os.readlink(f"/proc/{pid}/fd/0") == "/dev/null"


@pytest.mark.usefixtures("started")
def test_the_keeper_stays_small_and_maps_no_image(run: Path, runtime: Path) -> None:
    trainer = begun(run, runtime, kib=64 << 10)  # larger than what it may take up
    saved(trainer, 1)
    trainer.snapshot(2)
    trainer.wait_for(lambda status: status.counts.get("audited"))
    pid = keeper_pid(trainer.folder)
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "torch" not in maps
    assert "numpy" not in maps
    shared = [line.split()[0].split("-") for line in maps.splitlines() if "slot-00000" in line]
    sizes = [int(end, 16) - int(begin, 16) for begin, end in shared]
    assert len(sizes) == 3
    assert max(sizes) <= 2 * PAGE
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    own = int(status["RssAnon"].split()[0])
    assert own < 60 << 10, f"{own} kB of its own"
    assert int(status["VmRSS"].split()[0]) < 60 << 10


def test_many_runs_leave_nothing(run: Path, runtime: Path) -> None:
    """Descriptors, regions, processes, mappings: none grows, here or in the runtime folder."""
    import gc

    def counts() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("slot-00000")

    before = None
    for cycle in range(6):
        trainer = begun(run, runtime)
        saved(trainer, cycle + 1)
        trainer.end()
        trainer.folder.close()
        # The keeper closes its side of connections by itself.
        before = before or counts()
        eventually(lambda: all(now <= then for now, then in zip(counts(), before, strict=True)))  # noqa: B023
    eventually(lambda: keepers_of(runtime) == [])
    user = runtime / f"flashckpt-{os.geteuid()}"
    assert [entry.name for entry in user.iterdir()] == ["memory_budget.lock"]


def test_many_attempts_on_one_keeper_reuse_its_slots(run: Path, runtime: Path) -> None:
    parent, pid, regions = None, None, None
    for cycle in range(4):
        trainer = Process(run, runtime)
        trainer.do("start", parent, cycle, None)
        trainer.do("slots", 3)
        trainer.do("snapshot", cycle + 1, False)
        folder = runtime_of(run, runtime)
        pid = pid or keeper_pid(folder)
        assert keeper_pid(folder) == pid
        named = {name for name in folder.names() if is_region_name(name)}
        regions = regions or named
        assert named == regions
        descriptors = os.listdir(f"/proc/{pid}/fd")
        assert len(descriptors) < 40
        trainer.kill()
        parent = trainer.attempt
        eventually(lambda step=cycle + 1: step in committed(run))
        folder.close()


def test_it_lingers_after_a_death_and_not_after_a_close(run: Path, runtime: Path) -> None:
    trainer = begun_process(run, runtime, linger_s=1.0)
    trainer.do("snapshot", 1, False)
    folder = runtime_of(run, runtime)
    pid = keeper_pid(folder)
    trainer.kill()
    eventually(lambda: committed(run) == [1])
    assert keeper_pid(folder) == pid
    eventually(lambda: not Path(folder.path).exists())
    assert [line["kept"] for line in ledger(run) if line["event"] == "close" and "kept" in line] == [[]]


def test_what_a_closed_trainer_left_is_saved_though_nobody_asked(run: Path, runtime: Path) -> None:
    trainer = begun_process(run, runtime, linger_s=3600)
    trainer.do("snapshot", 1, True)
    trainer.do("snapshot", 2, False)
    trainer.end()
    eventually(lambda: keepers_of(runtime) == [])
    assert committed(run)[-1] == 2


def test_an_attempt_that_was_swept_before_its_end_was_noted_keeps_no_keeper(run: Path, runtime: Path) -> None:
    """The next attempt may commit, and clear the dead one's counter away, within the keeper's second."""
    first = Process(run, runtime, linger_s=0.1)
    first.do("start", None, 0, None)
    folder = runtime_of(run, runtime)
    pid = the_keeper(folder)
    os.kill(pid, signal.SIGSTOP)
    first.kill()
    (run / "alive" / first.attempt).unlink()
    os.kill(pid, signal.SIGCONT)
    eventually(lambda: keeper_pid(folder) is None)
    assert keepers_of(runtime) == []


def is_deleted(run: Path) -> bool:
    """Delete a run. False if the keeper has just written a file into a folder that was empty."""
    shutil.rmtree(run, ignore_errors=True)
    return not run.exists()


def test_a_run_that_is_deleted_takes_its_keeper_along(run: Path, runtime: Path) -> None:
    trainer = begun_process(run, runtime, linger_s=3600)
    trainer.do("snapshot", 1, False)
    folder = runtime_of(run, runtime)
    trainer.kill()
    eventually(lambda: committed(run) == [1])
    eventually(lambda: is_deleted(run))
    eventually(lambda: keepers_of(runtime) == [])
    eventually(lambda: not Path(folder.path).exists())
    assert not run.exists(), "a run that was deleted is not made again"


def test_a_disk_that_is_away_at_the_end_takes_no_snapshot_along(run: Path, runtime: Path) -> None:
    away = run.with_name("away")
    trainer = begun_process(run, runtime, linger_s=3600)
    folder = runtime_of(run, runtime)
    pid = the_keeper(folder)
    os.kill(pid, signal.SIGSTOP)
    name, _ = trainer.do("snapshot", 1, True)
    run.rename(away)
    os.kill(pid, signal.SIGCONT)
    trainer.end()
    gone = eventually(lambda: [pid] if "Errno 2" in log_of(folder) else None)
    with pytest.raises(AssertionError):
        eventually(lambda: name not in folder.names() or keepers_of(runtime) != gone, timeout_s=2.5)
    away.rename(run)
    eventually(lambda: keepers_of(runtime) == [])
    assert committed(run) == [1]


def test_a_run_that_is_gone_for_good_leaves_what_was_committed_nowhere(run: Path, runtime: Path) -> None:
    trainer = begun_process(run, runtime, linger_s=0)
    folder = runtime_of(run, runtime)
    trainer.do("snapshot", 1, False)
    name, _ = trainer.do("snapshot", 2, False)
    shutil.rmtree(run)
    trainer.end()
    eventually(lambda: keepers_of(runtime) == [])
    assert [each for each in folder.names() if is_region_name(each)] == [name]


def log_of(folder: RuntimeFolder) -> str:
    return (Path(folder.path) / "keeper.log").read_text()


def test_a_schedulers_signal_ends_the_lingering_not_the_work(run: Path, runtime: Path) -> None:
    trainer = begun_process(run, runtime, linger_s=3600)
    pid = the_keeper(runtime_of(run, runtime))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(pid, number)
    trainer.do("snapshot", 1, False)
    trainer.kill()
    eventually(lambda: keepers_of(runtime) == [])
    assert committed(run) == [1]


def test_who_asks_it_to_go_knew_of_no_later_trainer(run: Path, runtime: Path) -> None:
    """It was to end with the trainer of then: it lingers for the one that came afterwards."""
    first = Process(run, runtime, linger_s=3600)
    pid = the_keeper(runtime_of(run, runtime))
    os.kill(pid, signal.SIGTERM)
    second = Process(run, runtime, linger_s=3600)
    first.kill()
    second.do("start", None, 0, None)
    second.do("slots", 3)
    second.do("snapshot", 1, False)
    second.kill()
    eventually(lambda: committed(run) == [1])
    with pytest.raises(AssertionError):
        eventually(lambda: keepers_of(runtime) != [pid], timeout_s=2.5)


@pytest.mark.usefixtures("started")
def test_a_keeper_killed_at_its_birth_is_started_again(
    run: Path, tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, killed = tmp_path / "python", tmp_path / "killed"
    python.write_text(f'#!/bin/sh\nmkdir "{killed}" 2>&- && kill -9 $$\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    trainer = begun(run, runtime)
    assert killed.exists()
    saved(trainer, 1)
    trainer.end()
    eventually(lambda: keeper_pid(trainer.folder) is None)


def test_the_import_path_of_the_trainer_is_the_keepers(run: Path, tmp_path: Path, runtime: Path) -> None:
    """From a folder of its own, without PYTHONPATH: the library is found where the trainer found it, and a
    module of the working directory never stands in for one of Python's."""
    (tmp_path / "json.py").write_text("raise SystemExit('imported from the working directory')")
    code = (
        "import sys; sys.path[:] = [p for p in sys.path if p != sys.argv[3]] + [sys.argv[4]]\n"
        "from pathlib import Path; from tests.keeper.fake import FakeTrainer\n"
        "t = FakeTrainer(Path(sys.argv[1]), Path(sys.argv[2])); t.end(); print('served')"
    )
    root, flag = str(ROOT), "-P" if sys.version_info >= (3, 11) else "-s"
    found = subprocess.run(
        [sys.executable, flag, "-c", code, str(run), str(runtime), str(tmp_path), root],
        cwd=tmp_path, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert found.stdout.strip() == "served", found.stderr


def test_a_keeper_is_started_where_the_working_directory_was_deleted(
    run: Path, tmp_path: Path, runtime: Path
) -> None:
    """`sys.path` holds '' and a relative folder, as in an interactive session. The keeper dies after that."""
    here = tmp_path / "here"
    here.mkdir()
    code = (
        "import os, signal, sys; sys.path += ['', 'relative']\n"
        "from pathlib import Path; from tests.conftest import keepers_of\n"
        "from tests.keeper.fake import FakeTrainer\n"
        "base = Path(sys.argv[2]); os.rmdir(os.getcwd()); t = FakeTrainer(Path(sys.argv[1]), base)\n"
        "[pid] = keepers_of(base); os.kill(pid, signal.SIGKILL)\n"
        "while not t.client.tend(): pass\n"
        "assert keepers_of(base) != [pid]; t.end(); print('served')"
    )
    root = str(ROOT)
    found = subprocess.run(
        [sys.executable, "-c", code, str(run), str(runtime)],
        cwd=here, env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert found.stdout.strip() == "served", found.stderr


def test_trainers_of_which_no_keeper_heard_leave_no_names(run: Path, runtime: Path) -> None:
    """A job that crashes in its first lines and is restarted for ever, while the keeper lives."""
    trainer = FakeTrainer(run, runtime)
    code = (
        "import os, signal, sys; from flashckpt.memory.runtime import *;"
        "_, life = enter(sys.argv[1], sys.argv[2], trainer_lock_name(0));"
        "print(life.name, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    command = [sys.executable, "-c", code, str(runtime), Path(trainer.folder.path).name]
    name = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    assert name.startswith("trainer-")
    eventually(lambda: name not in trainer.folder.names())
    assert trainer.life.stands(trainer.folder)


# A trainer under a limit of the system: `attach` works or says why not


# Attaches in a child for each value of a limit, after torch was imported once, and says how that ended. What
# is not an address space is limited to the value, an address space to so many MiB more than are in use.
_PROGRAM = """
import os, resource, sys
from pathlib import Path
import torch, flashckpt
import flashckpt.checkpointer.run, flashckpt.checkpointer.resume, flashckpt.runs
from flashckpt.errors import FlashckptError
torch.set_num_threads(1)
limit = getattr(resource, f"RLIMIT_{sys.argv[2]}")
for value in map(int, sys.argv[3:]):
    if not (pid := os.fork()):
        os.closerange(3, 256)
        if limit == resource.RLIMIT_AS:
            value = int(Path("/proc/self/statm").read_text().split()[0]) * 4096 + (value << 20)
        model = torch.nn.Linear(64, 64)
        resource.setrlimit(limit, (value, value))
        said = "attached"
        try:
            checkpointer = flashckpt.attach(sys.argv[1], every=1, model=model)
            for batch in checkpointer.batches([torch.ones(2, 64)] * 3):
                model(batch)
            checkpointer.close()
        except FlashckptError as error:
            said = f"flashckpt: {error}"
        except (OSError, MemoryError) as error:
            said = f"{type(error).__name__}: {error}"
        os.write(1, (said.replace(chr(10), " ") + chr(10)).encode())
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("limit", "values"),
    [("NOFILE", (13, 14, 15, 16, 17, 18, 19)), ("FSIZE", (5_000, 70_000, 300_000)), ("AS", (20, 80, 200))],
)
def test_no_keeper_stays_where_attach_failed_under_a_limit(
    limit: str, values: tuple[int, ...], run: Path, runtime: Path
) -> None:
    """A keeper lingered for half an hour, with nothing in memory that another attempt could resume from."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(run), limit, *map(str, values)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=580,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ends = done.stdout.splitlines()
    assert len(ends) == len(values), done.stdout
    for end in ends:
        assert end.startswith(("attached", "flashckpt: ", "MemoryError")), end
    eventually(lambda: keepers_of(runtime) == [])
