"""Runs train.py in a process of its own and follows it through its log of losses."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from flashckpt.commit.attempts import open_run
from flashckpt.recovery.node import keeper_of, runtime_of
from flashckpt.store import open_store

HERE = Path(__file__).resolve().parent
Losses = list[tuple[int, float]]


class TrainingFailed(Exception):
    """A training process ended in a way that the demo did not mean."""


def read_losses(folder: Path, file: str = "losses.csv") -> Losses:
    """(step, loss) for each whole line; a loss is written with all the digits that a float has."""
    path = folder / file
    text = path.read_text() if path.exists() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [(int(step), float(loss)) for step, loss in (line.split(",") for line in lines)]


def run_to_the_end(folder: Path, *arguments: str, follow: Callable[[int], None]) -> None:
    """Train until the end. `follow` is called with the newest step, a few times a second."""
    process = _start(folder, *arguments)
    while process.poll() is None:
        time.sleep(0.2)
        _report(folder, follow)
    if process.returncode != 0:
        raise TrainingFailed(_last_words(folder, process.returncode))
    _report(folder, follow)


def run_until_killed(
    folder: Path, hold: int, *arguments: str, follow: Callable[[int], None], keeper_too: bool = False
) -> float:
    """Train until the process says that it stands in the backward pass of step `hold`, and kill it there,
    its keeper first if that is to die too: else it would save what is in memory at once.

    Returns the moment of the kill, in seconds of the system's monotonic clock.
    """
    read_fd, write_fd = os.pipe()
    process = _start(folder, "--hold", str(hold), "--report-fd", str(write_fd), *arguments, keep=write_fd)
    os.close(write_fd)
    try:
        while not select.select([read_fd], [], [], 0.2)[0]:
            _report(folder, follow)
        if os.read(read_fd, 64) != f"{hold}\n".encode():
            raise TrainingFailed(_last_words(folder, process.wait()))
        if keeper_too:
            _kill_keeper(folder / "run")
        process.send_signal(signal.SIGKILL)
        killed_at_s = time.monotonic()
    finally:
        os.close(read_fd)
        process.kill()  # it holds still for ever if this demo is interrupted
        process.wait()
    _report(folder, follow)
    return killed_at_s


def recover(folder: Path, *, columns: int) -> str:
    """What `flashckpt recover` prints, and puts right. Raises TrainingFailed if it does not end with 0."""
    command = [str(Path(sys.executable).parent / "flashckpt"), "recover", str(folder / "run")]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "COLUMNS": str(columns)}
    )
    if done.returncode != 0:
        raise TrainingFailed(f"recover ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def _kill_keeper(run: Path) -> None:
    """SIGKILL for the background process of this run, and of no other."""
    store = open_store(str(run))
    with runtime_of(store, open_run(store, create=False)) as runtime:
        keeper = keeper_of(runtime) if runtime is not None else None
    if keeper is None:
        raise TrainingFailed("The run has no keeper to kill.")
    os.kill(keeper, signal.SIGKILL)


def _start(folder: Path, *arguments: str, keep: int | None = None) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "output.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, str(HERE / "train.py"), str(folder), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=() if keep is None else (keep,),
        )


def _report(folder: Path, follow: Callable[[int], None]) -> None:
    losses = read_losses(folder)
    if losses:
        follow(losses[-1][0])


def _last_words(folder: Path, returncode: int) -> str:
    tail = (folder / "output.log").read_text(errors="replace").splitlines()[-25:]
    return "\n".join([f"train.py ended with {returncode}; its last words:", *tail])
