"""Writes a run with the code of now, to be kept for every later version:

    python -m tests.compat.make tests/compat/v4 tests/compat/v4-compressed

The second is a copy of the first whose shards stand compressed.

Attempt 1 commits steps 1 and 2, attempt 2 goes on to 3; attempt 3 is a branch at step 2, and attempt 4 goes
on to another 3. Step 1 is buried, one step has a mark. Not run by the tests: what is kept never changes.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import flashckpt
from flashckpt.capture import constants
from flashckpt.commit.attempts import attempts
from flashckpt.commit.lineage import mark
from flashckpt.commit.retention import bury
from flashckpt.format.names import claim_path
from flashckpt.format.records import Claim
from flashckpt.store import open_store
from flashckpt.store.local import LocalStore
from flashckpt.tiers.run_copy import copy_run
from tests.compat.contents import contents
from tests.compat.state import Job
from tests.waiting import until


def main(folder: Path, compressed: Path) -> None:
    run = folder / "run"
    os.environ["FLASHCKPT_RUNTIME"] = runtime = tempfile.mkdtemp(dir="/dev/shm")
    constants.LEAST_BYTES = 1024  # a kept run is small, and has them all the same
    train(run, 2)
    train(run, 1)
    flashckpt.branch(run, 2)
    train(run, 1)
    until(lambda: not any(each.is_dir() for each in Path(runtime).glob("*/*")), "the keeper's end")
    shutil.rmtree(runtime)
    store = LocalStore(str(run))
    first, _, last = attempts(store)
    assert bury(store, 1, first.name)
    mark(store, 3, last.name, "another-host", "a chunk differs")
    shutil.rmtree(run / "events")
    for info in attempts(store):
        forget_machine(run, info.name.number)
    copy_run(open_store(run), open_store(compressed / "run"), all_steps=True, compress="zstd")
    for each in folder, compressed:
        found = json.dumps(contents(each / "run"), indent=1, sort_keys=True)
        (each / "expected.json").write_text(found + "\n")


def train(run: Path, steps: int) -> None:
    job = Job(seed=5)
    with flashckpt.attach(run, every=None, persist_every=None, **job.named) as checkpointer:
        for _ in range(steps):
            job.train()
            checkpointer.step()
            checkpointer.save()
            checkpointer.wait()


def forget_machine(run: Path, number: int) -> None:
    """Who held the run says nothing to a reader elsewhere."""
    path = run / claim_path(number)
    record = Claim.from_bytes(path.read_bytes(), path.name)
    holder = replace(record.holder, boot_id="0" * 36, runtime="", runtime_id="1:2", host="a-host", pid=number)
    path.write_bytes(replace(record, holder=holder).to_bytes())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
