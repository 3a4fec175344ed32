"""A loader's workers, forked while a run is attached: they hold nothing of ours, neither memory nor a socket
nor a lock, and what is let go while they live is free."""

import multiprocessing
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import flashckpt
from flashckpt.memory import region
from tests.checkpointer.test_loop import Job
from tests.waiting import until, until_slots


def descriptors(pid: int) -> set[str]:
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
        except FileNotFoundError:
            continue
    return found


def ours(pid: int, runtime: Path, sockets: set[str]) -> list[str]:
    """What a process has open, or mapped, of the runtime folder, of nameless regions, or of `sockets`."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    mapped = {line.split(None, 5)[5] for line in maps if len(line.split(None, 5)) == 6}
    names = (str(runtime), "/memfd:slot", "/memfd:constants")
    return sorted(each for each in descriptors(pid) | mapped if each.startswith(names) or each in sockets)


def lets_go(pid: int, runtime: Path, sockets: set[str]) -> bool:
    return not ours(pid, runtime, sockets)


def workers() -> list[int]:
    return [each.pid for each in multiprocessing.active_children() if each.pid is not None]


def loader() -> DataLoader[Any]:
    data = TensorDataset(torch.randn(64, 4))
    return DataLoader(
        data, batch_size=2, num_workers=2, persistent_workers=True, multiprocessing_context="fork"
    )


@pytest.mark.parametrize("kind", [region.NAMED, region.MEMFD])
def test_forked_workers_hold_nothing_of_a_run(
    tmp_path: Path, runtime: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == region.MEMFD:
        monkeypatch.setenv("FLASHCKPT_RUNTIME", str(tmp_path))  # no tmpfs: regions have no names
        runtime = tmp_path
    job, others = Job(), loader()
    with flashckpt.attach(tmp_path / "run", every=1, **job.named) as checkpointer:
        for x in checkpointer.batches([torch.ones(2, 4)] * 8):
            until_slots(checkpointer)
            job.train(x)
            if checkpointer.completed == 5:
                peer = checkpointer._session.keeper._peer
                socket = {os.readlink(f"/proc/self/fd/{peer.fileno()}")}
                assert len(ours(os.getpid(), runtime, socket)) >= 7, "slots, folder, lock, stacks, socket"
                batches = iter(others)
                next(batches)
                assert len(workers()) == 2
                for pid in workers():  # one may only be beginning, and has let go of nothing yet
                    until(partial(lets_go, pid, runtime, socket), "a worker that holds nothing")
        assert len(list(batches)) == 31
    # Workers live on: what the run had is free, since none of them holds it.
    assert len(workers()) == 2
    for pid in workers():
        assert ours(pid, runtime, socket) == []
    assert flashckpt.steps(tmp_path / "run")[-1] == 8


def test_a_child_closes_no_file_of_its_own(tmp_path: Path, runtime: Path) -> None:
    """Numbers of descriptors are used again: what of ours goes later in the child must not close those."""
    job = Job()
    with flashckpt.attach(tmp_path / "run", every=1, **job.named) as checkpointer:
        for x in checkpointer.batches([torch.ones(2, 4)] * 5):
            until_slots(checkpointer)
            job.train(x)
            if checkpointer.completed == 4:
                child = os.fork()
                if child == 0:
                    mine = [os.memfd_create("mine") for _ in range(200)]
                    checkpointer._session.close()
                    for slot in checkpointer._keeper_link.slots.ring.slots:  # type: ignore[union-attr]
                        slot.close()
                    os._exit(0 if all(os.fstat(each) for each in mine) else 1)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert flashckpt.steps(tmp_path / "run")[-1] == 5
