"""Several contents of one step number, killed around each of them: nothing that is found is a mix of two, and
what `wait()` has called safe is there."""

import contextlib
import json
import os
import random
import signal
from pathlib import Path

import pytest

import flashckpt
from tests import zygote
from tests.processes import end, is_stopped, keepers_of
from tests.waiting import until

_LIVES, _MOST_LIVES, _EPOCHS = 4, 16, 12
_TRAINERS = ["seal.submitted", "seal.submitting", "capture.begun", "capture.copied"]
_KEEPERS = [
    "audit.pinned", "write.begun", "write.written", "part.checked", "part.linked", "manifest.checked",
    "manifest.written", "version.created", "commit.marked", "prune.begun", "prune.done",
]  # fmt: skip


def killed(folder: Path, runtime: Path, number: int, armed: str, chance: random.Random) -> list[list[object]]:
    """A life until its point: what it said. A keeper that stands at its own is killed, or told to go on."""
    log = folder / f"log-{number}"
    program = ["tests.crash.overtaken", str(folder / "run"), str(log), str(chance.random())[2:], str(_EPOCHS)]
    environment = {**os.environ, "FLASHCKPT_RUNTIME": str(runtime), "FLASHCKPT_CRASH_AT": armed}
    with open(folder / "said", "ab") as said:
        process = zygote.start(program, stdout=said, stderr=said, env=environment)
    until(lambda: process.poll() is not None or standing(runtime), "a life to be over")
    process.kill()
    assert process.wait(240) in (0, -signal.SIGKILL), (folder / "said").read_text()
    if chance.random() < 0.5:
        end(keepers_of(runtime))
    for pid in standing(runtime):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    return [json.loads(line) for line in lines]


def standing(runtime: Path) -> list[int]:
    return [pid for pid in keepers_of(runtime) if is_stopped(pid)]


def tags_on_disk(run: Path) -> list[int]:
    assert flashckpt.verify(run).ok
    found = []
    for step in flashckpt.steps(run):
        leaves = {name: leaf for name, leaf in flashckpt.load(run, step).items() if name.startswith("model.")}
        tags = {int(value) for leaf in leaves.values() for value in leaf.unique()}
        assert len(tags) == 1, f"step {step} is a mix of {tags}"
        found.append(tags.pop())
    return found


@pytest.mark.parametrize("point", _TRAINERS + _KEEPERS)
def test_no_mix_and_nothing_safe_is_lost(point: str, tmp_path: Path, runtime: Path) -> None:
    chance = random.Random(point)
    safe = number = 0
    while number < _LIVES or not (safe or number == _MOST_LIVES):
        action = "stop" if point in _KEEPERS else "kill"
        armed = f"{point}:{chance.randint(1, 12)}:{action}"
        for what, tag, _ in killed(tmp_path, runtime, number, armed, chance):
            assert tag >= safe, f"life {number} went on from {tag}, where {safe} was safe"
            if what == "safe":
                safe = tag
        # A keeper that lives deletes beside whoever looks.
        if (tmp_path / "run/catalogue").exists() and not keepers_of(runtime):
            tags = tags_on_disk(tmp_path / "run")
            assert tags == sorted(tags)
            assert max(tags, default=0) >= safe
        number += 1
    assert safe > 0
