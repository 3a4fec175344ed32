"""Two nodes with two ranks each, whose replicas divide a node's memory: killed and rebooted they go on from
their caches, with the bits of ranks that nobody has killed."""

import json
from pathlib import Path

import pytest

import flashckpt
from tests.cache.home import Home, cached_steps, files_in
from tests.ranks.launch import Launch, Launcher
from tests.ranks.test_ddp import PROGRAM, assert_went_on, undisturbed
from tests.waiting import until

pytestmark = pytest.mark.dist

NODES, RANKS, HELD = 2, 2, 4
# So wide that ranks of a node divide what is alike.
WIDTH = 1 << 15


def started(launcher: Launcher, home: Home, cache: Path, restart: int, **orders: object) -> Launch:
    orders |= {"cache": str(cache), "width": WIDTH}
    return launcher.fork(PROGRAM, home.url, json.dumps(orders), ranks=RANKS, nodes=NODES, restart=restart)


def reboot(launcher: Launcher, *nodes: int) -> None:
    for node in nodes:
        launcher.kill_keepers(node, remove_regions=True)


def caches(launcher: Launcher, cache: Path) -> list[Path]:
    return [cache / launcher.runtime(node).name for node in range(NODES)]


def until_cached(launcher: Launcher, cache: Path, step: int) -> None:
    for each in caches(launcher, cache):
        until(lambda each=each: step in cached_steps(each, RANKS), f"step {step} in {each}")  # type: ignore[misc]


def test_nodes_restart_from_their_caches_and_read_nothing_of_the_home(
    launcher: Launcher, home: Home, tmp_path: Path, cache: Path
) -> None:
    whole = undisturbed(launcher, tmp_path / "whole", NODES * RANKS, width=WIDTH)
    killed = started(launcher, home, cache, 0, hold_at=HELD, save_at="each")
    killed.until_said(f"held {HELD}")
    until(lambda: home.steps[-1:] == [HELD], "the step at home")
    until_cached(launcher, cache, HELD)
    killed.kill()
    before = [killed.said(rank) for rank in range(NODES * RANKS)]
    reboot(launcher, 0, 1)
    read = len(home.reads_of_data())
    ended = started(launcher, home, cache, 1).finished()
    assert home.reads_of_data()[read:] == []
    for rank, each in enumerate(ended):
        assert each.out[0] == f"resumed {HELD} cache", each.err
        assert_went_on(whole[rank], before[rank], each.out, HELD)
    assert flashckpt.verify(home.url).ok


@pytest.mark.long
def test_a_node_that_has_lost_its_cache_makes_all_read_the_home(
    launcher: Launcher, home: Home, tmp_path: Path, cache: Path
) -> None:
    killed = started(launcher, home, cache, 0, hold_at=HELD, save_at="each")
    killed.until_said(f"held {HELD}")
    until(lambda: home.steps[-1:] == [HELD], "the step at home")
    until_cached(launcher, cache, HELD)
    killed.kill()
    reboot(launcher, 0, 1)
    for path in files_in(caches(launcher, cache)[1]):
        path.unlink()
    held = started(launcher, home, cache, 1, hold_at=HELD + 1)
    held.until_said(f"held {HELD + 1}")
    tiers = [held.said(rank)[0] for rank in range(NODES * RANKS)]
    assert tiers == [f"resumed {HELD} cache"] * RANKS + [f"resumed {HELD} local"] * RANKS
    held.kill()
