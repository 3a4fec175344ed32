"""Options(slots=1): what stands in the one slot is committed before it is overwritten."""

from collections.abc import Callable
from pathlib import Path

import torch

import flashckpt
from tests.checkpointer.test_loop import Job
from tests.waiting import newest_sealed, until


def test_a_snapshot_is_on_disk_before_the_next_takes_its_place(
    tmp_path: Path, runtime: Path, kill_keepers: Callable[..., None]
) -> None:
    run, job, captured = tmp_path / "run", Job(), list[int]()
    options = flashckpt.Options(slots=1)
    with flashckpt.attach(
        run, every=1, persist_every=None, keep=flashckpt.Keep(last=20), options=options, **job.named
    ) as checkpointer:

        def one() -> bool:
            job.train(torch.ones(2, 4))
            checkpointer.step()
            sealed = newest_sealed(checkpointer)
            if sealed >= 0 and sealed not in captured:
                assert set(captured) <= set(flashckpt.steps(run)), "the one before was on disk"
                captured.append(sealed)
            return len(captured) >= 3

        until(one, "three snapshots")
        assert len(list(runtime.glob("*/*/slot-*"))) == 1
        done = checkpointer.completed
    assert flashckpt.steps(run)[-1] == done
    kill_keepers(remove_regions=True)
    with flashckpt.attach(run, every=None, options=options, **Job().named) as checkpointer:
        assert checkpointer.completed == done
