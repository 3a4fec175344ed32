"""Runs train.py in its own process and follows it by its log of losses."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from flashckpt.commit.view import open_run
from flashckpt.keeper.node_keepers import keeper_of
from flashckpt.recovery.node import runtime_of
from flashckpt.store import open_store

HERE = Path(__file__).resolve().parent
Losses = list[tuple[int, float]]


class TrainingFailed(Exception):
    """A training process ended unexpectedly."""


def read_losses(folder: Path, file: str = "losses.csv") -> Losses:
    """Read (step, loss) from each complete line. Losses are written with all digits of a float."""
    path = folder / file
    text = path.read_text() if path.exists() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [(int(step), float(loss)) for step, loss in (line.split(",") for line in lines)]


def run_to_the_end(folder: Path, *arguments: str, follow: Callable[[int], None]) -> None:
    """Train to the end. Call `follow` with the newest step a few times a second."""
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
    """Train until the process reports that it pauses in the backward pass of step `hold`, and kill it. With
    `keeper_too`, kill its keeper first, which would otherwise save the snapshots in memory at once.

    Return the time of the kill, in seconds of the monotonic clock.
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
        process.kill()  # it would pause forever if this demo is interrupted
        process.wait()
    _report(folder, follow)
    return killed_at_s


def recover(folder: Path, *, columns: int) -> str:
    """Run `flashckpt recover` and return its output. Raises TrainingFailed if it does not exit with 0."""
    command = [str(Path(sys.executable).parent / "flashckpt"), "recover", str(folder / "run")]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "COLUMNS": str(columns)}
    )
    if done.returncode != 0:
        raise TrainingFailed(f"recover ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def _kill_keeper(run: Path) -> None:
    """Send SIGKILL to the keeper of this run."""
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
    return "\n".join([f"train.py exited with {returncode}; its last lines:", *tail])
