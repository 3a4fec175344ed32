"""A node is lost with its disk and its memory: the run goes on on a new one, from its remote on a real S3
server, exactly."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import flashckpt
from tests.contracts.run_contract import reference
from tests.resume.training import Trainer, last_of_each
from tests.waiting import until

pytestmark = pytest.mark.process


@pytest.mark.usefixtures("in_environment")
def test_a_lost_node(bucket: str, tmp_path: Path, runtime: Path, kill_keepers: Callable[..., None]) -> None:
    url = f"s3://{bucket}/run"
    trainer = Trainer(tmp_path, runtime, "workers", remote=url)
    # An object store's client is not for forked processes.
    trainer.kill_in_step(6, fresh=True)
    trainer.wait_committed()
    newest = flashckpt.steps(trainer.run)[-1]

    def there() -> int:
        try:
            return max(flashckpt.steps(url), default=-1)
        except flashckpt.NoSuchStepError:
            return -1

    # What the dead trainer left may have followed: then this one is never sent.
    until(lambda: there() >= newest, "the copy")
    kill_keepers(remove_regions=True)
    shutil.rmtree(trainer.run)
    trainer.finish(fresh=True)
    [resumed] = trainer.events("resume")
    assert resumed["tier"] == "remote"
    assert resumed["step"] >= newest
    assert last_of_each(trainer.records()) == reference(tmp_path / "reference", runtime)
    assert flashckpt.verify(trainer.run).ok
    until(lambda: flashckpt.steps(url)[-1] == flashckpt.steps(trainer.run)[-1], "what came last")
