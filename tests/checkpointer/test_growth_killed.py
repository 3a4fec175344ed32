"""State that grows in every step, killed by SIGKILL again and again around the growth of its slots.

Each life is killed at a named point of the trainer or of its keeper, or wherever it is once it has done so
many steps; some with their keeper. The trainer goes on only once a snapshot that was begun is sealed, so that
what a kill may cost is the same on any machine.
"""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import zygote
from tests.events import whole_lines
from tests.processes import end, keepers_of
from tests.waiting import until

_LIVES, _STEPS = 6, 64
# One is skipped while larger slots are made, one is in flight, and the next has begun before that is sealed.
_LOST = 3
_PROGRAM = "tests.checkpointer.growing_step_by_step"


class Line(NamedTuple):
    what: str
    step: int
    checksum: int


class Lives:
    def __init__(self, folder: Path, runtime: Path) -> None:
        self.run, self._folder, self.runtime = folder / "run", folder, runtime
        self.count = 0

    @property
    def _log(self) -> Path:
        return self._folder / f"log-{self.count}"

    def lines(self) -> list[Line]:
        # The last may be half a line: its writer was killed.
        whole = self._log.read_text().split("\n")[:-1] if self._log.exists() else []
        return [Line(*json.loads(line)) for line in whole]

    def goes(self, *, kill_after: int, armed: str, keeper_too: bool) -> list[Line]:
        """One life: until it kills itself, its keeper stops at the point, or it has done so many steps."""
        self.count += 1
        environment = {"FLASHCKPT_RUNTIME": str(self.runtime), "FLASHCKPT_CRASH_AT": armed}
        program = [_PROGRAM, str(self.run), str(self._log), str(_STEPS)]
        with open(self._folder / "said", "ab") as said:
            process = zygote.start(program, stdout=said, stderr=said, env={**os.environ, **environment})

        def is_over() -> bool:
            return process.poll() is not None or self._has_done(kill_after) or self._keeper_stopped()

        until(is_over, "a life to be over")
        keeper_too |= self._keeper_stopped()
        process.kill()
        assert process.wait(240) in (0, -signal.SIGKILL), (self._folder / "said").read_text()
        if keeper_too:
            end(keepers_of(self.runtime))
        return self.lines()

    def _has_done(self, steps: int) -> bool:
        return sum(line.what == "done" for line in self.lines()) >= steps

    def _keeper_stopped(self) -> bool:
        stats = [Path(f"/proc/{pid}/stat") for pid in keepers_of(self.runtime)]
        return any(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in stats if stat.exists())


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, int]:
    """The checksum after each step of a run that nothing of this library has touched."""
    folder = tmp_path_factory.mktemp("reference")
    program = [_PROGRAM, str(folder / "run"), str(folder / "log"), str(_STEPS)]
    done = zygote.shared().run(program, env={**os.environ, "FLASHCKPT": "off"})
    assert done.returncode == 0, done.stderr
    lines = [Line(*json.loads(line)) for line in whole_lines(folder / "log")]
    assert [line.step for line in lines] == list(range(_STEPS + 1))
    return {line.step: line.checksum for line in lines}


# A keeper is stopped at its point: each that is started after it is armed as well, and would die of it, too.
@pytest.mark.parametrize(
    "armed",
    ["slots.taken:{}:stop", "capture.copied:{}", "seal.submitted:{}", pytest.param("", id="anywhere")],
)
def test_no_kill_costs_more_than_the_growth(
    armed: str, tmp_path: Path, runtime: Path, reference: dict[int, int]
) -> None:
    chance, lives = random.Random(armed), Lives(tmp_path, runtime)
    floor = done = 0
    for _ in range(_LIVES):
        point = armed.format(chance.randint(1, 9))
        lines = lives.goes(kill_after=chance.randint(3, 12), armed=point, keeper_too=chance.random() < 0.3)
        for line in lines:
            assert line.checksum == reference[line.step], (line, lives.count)
        if not lines:
            continue  # killed before it had begun
        resumed = lines[0]
        assert resumed.what == "resumed"
        assert resumed.step >= floor, "what was sealed is there"
        assert done - resumed.step <= _LOST, f"life {lives.count}: {done} steps were done"
        floor = max([resumed.step, *(line.step for line in lines if line.what == "sealed")])
        done = max(line.step for line in lines)
    assert done > _LOST
