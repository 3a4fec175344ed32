"""A trainer under a limit of the system: `attach` works or says why not, and no keeper stays behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import keepers_of
from tests.keeper.driver import eventually

ROOT = Path(__file__).resolve().parents[2]

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
