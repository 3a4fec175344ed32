"""Nodes whose run is on a disk of their own: each commits its ranks, and a job goes on from what all have."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

import flashckpt
from flashckpt.commit.attempts import read_start
from flashckpt.commit.lineage import resolve
from flashckpt.errors import NoSuchStepError
from flashckpt.store import open_store
from flashckpt.store.local import LocalStore
from flashckpt.tiers.run_copy import copy_run
from tests.processes import end, keepers_of
from tests.ranks.launch import Launch, Launcher
from tests.ranks.own_disk import folder_of, installed, make_room
from tests.ranks.test_ddp import PROGRAM, assert_went_on, steps_of, undisturbed
from tests.waiting import until

pytestmark = pytest.mark.dist


class Disks:
    """Two nodes or more, and what each has of one run."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        self.launcher, self.url = launcher, f"disk://{folder}/run"
        self._packages = installed(folder / "packages")

    def folder(self, node: int) -> Path:
        return Path(folder_of(self.url, self.launcher.runtime(node)))

    def start(
        self,
        *,
        ranks: int = 1,
        nodes: Any = 2,
        restart: int = 0,
        shared: str = "",
        full: str = "",
        stops: str = "",
        max_restarts: int = 0,
        **orders: Any,
    ) -> Launch:
        """Under torchrun where it is to start ranks again. `stops`: at which crash point a node's keeper is
        stopped, in a run that begins: "name=point:count"."""
        more = {
            "FLASHCKPT_TEST_PACKAGES": self._packages,
            "FLASHCKPT_TEST_SHARED": shared,
            "FLASHCKPT_TEST_FULL": full,
            "FLASHCKPT_TEST_STOPS": stops,
        }
        about = "tests.ranks.own_disk", PROGRAM, self.url, json.dumps(orders)
        places: dict[str, Any] = {"ranks": ranks, "nodes": nodes, "environment": more}
        if max_restarts:
            return self.launcher.torchrun(*about, **places, max_restarts=max_restarts)
        return self.launcher.fork(*about, **places, restart=restart)

    def forget(self, *nodes: int) -> None:
        """All that nodes have in memory goes, and what their keepers had not written yet."""
        self.launcher.freeze_keepers(*nodes)
        for node in nodes:
            self.launcher.kill_keepers(node, remove_regions=True)

    def has_stopped(self, node: int) -> bool:
        """Whether a node's keeper stands at its crash point."""
        pids = keepers_of(self.launcher.runtime(node))
        states = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids]
        return states == ["T"]

    def steps(self, node: int) -> list[int]:
        return flashckpt.steps(self.folder(node))


@pytest.fixture
def disks(launcher: Launcher, tmp_path: Path) -> Disks:
    return Disks(launcher, tmp_path)


def refused(job: Launch, kind: str, *words: str) -> None:
    """All ranks have ended with this error, alike."""
    for each in job.ended():
        assert each.status == 1, job.told()
        last = each.err[each.err.rindex(f"{kind}: ") :]
        assert all(word in last for word in words), last


COMMON, ALONE = [3, 4], [8, 9]


@pytest.mark.long
def test_what_one_node_has_alone_is_not_gone_on_from(disks: Disks, tmp_path: Path) -> None:
    """One node goes on committing when the other's disk is full, and keeps what both have: from there
    all go on when both are killed. Of what it kept it deletes nothing that the other may lack."""
    whole = undisturbed(disks.launcher, tmp_path / "whole", 2)
    full = f"{disks.launcher.runtime(1).name}={ALONE[0]}"
    job = disks.start(options={"every": None}, save_at=[*COMMON, *ALONE], hold_at=10, keep_last=2, full=full)
    job.until_said("held 10")
    until(lambda: ALONE[-1] in disks.steps(0), "what one node commits alone")
    disks.launcher.freeze_keepers(0)
    job.kill()
    assert disks.steps(1) == COMMON
    assert set(disks.steps(0)) >= {*COMMON, *ALONE}
    disks.forget(0, 1)
    ended = disks.start(restart=1, save_at=[11, 12], keep_last=2).finished()
    for rank in range(2):
        assert ended[rank].out[0] == f"resumed {COMMON[-1]} local"
        assert_went_on(whole[rank], job.said(rank), ended[rank].out, COMMON[-1])
    last = max(steps_of(whole[0].out))
    for node in range(2):
        # What is kept no longer goes once all have newer ones.
        until(lambda node=node: disks.steps(node) == [12, last], "retention")


@pytest.mark.long
def test_a_folder_has_its_ranks_alone_and_says_so(disks: Disks) -> None:
    disks.start(ranks=2, epochs=1, save_at=2, options={"every": None}).finished()
    assert disks.steps(0) == disks.steps(1) == [2, 3]
    for node, mine, others in ((0, "ranks 0-1", "ranks 2-3"), (1, "ranks 2-3", "ranks 0-1")):
        assert flashckpt.verify(disks.folder(node)).ok
        with pytest.raises(NoSuchStepError, match=f"it has {mine}; on the disks of other nodes: {others}"):
            flashckpt.load(disks.folder(node))
    disks.forget(0, 1)
    # The nodes have changed places.
    refused(
        disks.start(ranks=2, nodes=[1, 0], restart=1), "UnusableRunError", "it has ranks 2-3 and not rank 0"
    )
    # Fewer ranks than made it.
    refused(disks.start(restart=2), "UnusableRunError", "cannot be read by rank 1", "where its folder is")
    shutil.rmtree(disks.folder(1))
    refused(disks.start(ranks=2, restart=3), "UnusableRunError", "cannot be read by rank 2, 3")


@pytest.mark.long
def test_nodes_that_share_a_folder_commit_together(disks: Disks) -> None:
    names = [disks.launcher.runtime(node).name for node in range(3)]
    disks.start(nodes=3, epochs=1, save_at=2, shared=f"{names[2]}={names[1]}").finished()
    assert not disks.folder(2).exists()
    for node, ranks in ((0, (range(1),)), (1, (range(1, 3),))):
        store = LocalStore(str(disks.folder(node)))
        newest = resolve(store)
        assert newest.manifest.ranks == ranks
        assert read_start(store, newest.attempt).ranks == ranks


def test_what_a_job_goes_on_from_in_memory_is_one_step_on_all_disks(disks: Disks) -> None:
    """One node has committed it and the other not yet when the job dies: the other does so later, as the same
    step, and all can go on from it again. Until then no rank is told that it is safe."""
    full = f"{disks.launcher.runtime(1).name}=5"
    job = disks.start(options={"every": None}, save_at=[3, 5], hold_at=6, full=full)
    job.until_said("held 6")
    until(lambda: 5 in disks.steps(0), "what one node commits alone")
    job.kill()
    options = {"every": None}
    job = disks.start(restart=1, wait_at=5, hold_at=5, grace="1s", options=options, full=full)
    job.until_said("unsafe 5")
    assert [job.said(rank)[0] for rank in range(2)] == ["resumed 5 memory"] * 2
    make_room(disks.folder(1))
    job.until_said("safe 5")
    assert disks.steps(1)[-1] == 5
    job.until_said("held 5")
    disks.launcher.freeze_keepers(0, 1)
    job.kill()
    disks.forget(0, 1)
    ended = disks.start(restart=2, epochs=1, options={"every": None}).finished()
    assert [each.out[0] for each in ended] == ["resumed 5 local"] * 2


@pytest.mark.long
def test_what_a_job_went_on_from_stays_until_all_disks_have_a_newer_step(disks: Disks) -> None:
    """One node's disk lacks it, and takes a newer step, which the other's does not: what it has in memory is
    not let go for that, and is what all go on from."""
    names = [disks.launcher.runtime(node).name for node in range(2)]
    full = f"{names[0]}=8 {names[1]}=5-7"
    job = disks.start(options={"every": None}, save_at=[3, 5], hold_at=6, full=full)
    job.until_said("held 6")
    until(lambda: 5 in disks.steps(0), "what one node commits alone")
    job.kill()
    job = disks.start(restart=1, options={"every": None}, save_at=8, hold_at=9, full=full)
    job.until_said("held 9")
    assert [job.said(rank)[0] for rank in range(2)] == ["resumed 5 memory"] * 2
    until(lambda: disks.steps(1) == [3, 8], "what the other node commits alone")
    make_room(disks.folder(1))
    until(lambda: disks.steps(1) == [3, 5, 8], "what was in memory alone")
    disks.launcher.freeze_keepers(0, 1)
    job.kill()
    disks.forget(0, 1)
    ended = disks.start(restart=2, epochs=1, options={"every": None}).finished()
    assert [each.out[0] for each in ended] == ["resumed 5 local"] * 2


@pytest.mark.long
def test_torchrun_goes_on_from_what_all_disks_have_where_all_died_between_two_commits(
    disks: Disks, tmp_path: Path
) -> None:
    """One node's keeper is at its manifest when ranks, keepers and memory of both go: that step is the other
    node's alone. The one before, of which wait() said that it is safe, is what all go on from."""
    whole = undisturbed(disks.launcher, tmp_path / "whole", 2)
    stops = f"{disks.launcher.runtime(1).name}=manifest.checked:2"
    options = {"every": None}
    job = disks.start(
        stops=stops, max_restarts=1, options=options, save_at=[3, 5], wait_at=4, hold_at=6, holds_once=True
    )
    job.until_said("held 6")
    until(lambda: disks.has_stopped(1) and 5 in disks.steps(0), "a commit, and one that is about to be")
    assert (disks.steps(0), disks.steps(1)) == ([3, 5], [3])
    for launcher in job.launchers.values():
        launcher.send_signal(signal.SIGSTOP)
    disks.launcher.freeze_keepers(0, 1)
    end([job.pid_of(rank) for rank in range(2)])
    disks.forget(0, 1)
    for launcher in job.launchers.values():
        launcher.send_signal(signal.SIGCONT)
    ended = job.finished(restart=1)
    for rank in range(2):
        before = job.said(rank)
        assert "safe 4" in before
        assert ended[rank].out[0] == "resumed 3 local"
        assert_went_on(whole[rank], before, ended[rank].out, 3)
    assert disks.steps(0)[-1] == disks.steps(1)[-1] == max(steps_of(whole[0].out))


@pytest.mark.long
def test_a_lost_disk_and_another_number_of_ranks_with_a_remote(disks: Disks, tmp_path: Path) -> None:
    """Each node sends its part. A node whose disk is empty reads its ranks' from there, the other its own;
    and one alone, whose disk has one rank of two, reads all of it there."""
    remote = tmp_path / "remote"
    options = {"every": None, "remote": str(remote)}
    job = disks.start(options=options, save_at=[4, 8], hold_at=10)
    job.until_said("held 10")
    until(lambda: remote.exists() and 8 in flashckpt.steps(remote), "both nodes' parts")
    disks.launcher.freeze_keepers(0, 1)
    job.kill()
    disks.forget(0, 1)
    shutil.rmtree(disks.folder(1))

    again = disks.start(restart=1, options=options, wait_at=8)
    ended = again.finished()
    for rank, tier in enumerate(("local", "remote")):
        assert ended[rank].out[:2] == [f"resumed 8 {tier}", "safe 8"]
        before, after = steps_of(job.said(rank)), steps_of(ended[rank].out)
        assert [after[step] for step in (9, 10)] == [before[step] for step in (9, 10)]
    last = disks.steps(0)[-1]
    assert disks.steps(1) == [last]
    until(lambda: flashckpt.steps(remote)[-1] == last, "what came last")
    assert flashckpt.verify(remote).ok

    disks.forget(0, 1)
    # The remote is behind the disks, which have two ranks: that is said to one that is alone, and to three.
    shutil.rmtree(next(remote.glob(f"steps/*{last}")))
    older, bring = flashckpt.steps(remote)[-1], f"`flashckpt recover {disks.url} --remote {remote}`"
    words = f"has step {older}, of all ranks", bring, f"To go on from step {older}, move {disks.url} away"
    refused(disks.start(nodes=1, options=options), "NoSuchStepError", f"of step {last}, made by 2", *words)
    refused(disks.start(ranks=3, nodes=1, options=options), "UnusableRunError", f"of step {last}", *words)
    for node in range(2):
        assert copy_run(LocalStore(str(disks.folder(node))), open_store(remote), joins=True).ok
    [alone] = disks.start(nodes=1, options=options, epochs=4).finished()
    assert alone.out[0] == f"resumed {last} remote"
    assert min(steps_of(alone.out)) == last + 1
    until(lambda: flashckpt.steps(remote)[-1] > last, "what it did alone")
    assert flashckpt.verify(remote).ok
