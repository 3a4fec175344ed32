"""The search itself: the reduction loses no final state, kills and pages are turns, and the shortest fault is
named."""

from __future__ import annotations

import pytest

from flashckpt.store.base import Store
from tests.protocol.memory_store import File, Files, FolderStore, object_store
from tests.protocol.search import Actor, OpenStore, Search, World

STORES = [FolderStore, object_store]


def _count_up(store: Store) -> object:
    """A counter without exclusion, beside reads that no other actor affects."""
    store.exists("home/elsewhere")
    found = int(store.read("counter", 9))
    store.list("nothing")
    store.replace("counter", b"%d" % (found + 1))
    store.create(f"mine/{found}", b"")
    return found + 1, len(store.list("mine"))


def _actors() -> list[Actor]:
    return [
        Actor("one", _count_up),
        Actor("two", _count_up),
        Actor("three", lambda store: len(store.list("mine"))),
    ]


def _files(open_store: OpenStore) -> Files:
    return {**({"home": None} if open_store is FolderStore else {}), "home/counter": File(b"0")}


@pytest.mark.parametrize("open_store", STORES)
def test_the_reduced_search_reaches_the_same_ends(open_store: OpenStore) -> None:
    full, reduced = (
        Search(_files(open_store), _actors(), open_store, reduced=reduced).run() for reduced in (False, True)
    )
    assert full.finals == reduced.finals
    assert len(full.finals) > 20
    assert reduced.states < full.states


def test_a_lost_update_is_found_by_its_shortest_schedule() -> None:
    def counted(world: World) -> str:
        ends = len(world.reports)
        return "an update is lost" if ends == 2 and world.store().read("counter", 9) != b"2" else ""

    actors = _actors()[:2]
    found = Search(_files(FolderStore), actors, FolderStore, [counted], most_deaths=0).run()
    assert found.fault.startswith("counted: an update is lost")
    assert "  one  replace home/counter" in found.fault
    assert Search(_files(FolderStore), actors[:1], FolderStore, [counted]).run().fault == ""


def test_a_kill_in_a_creation_leaves_a_temporary_file() -> None:
    actor = Actor("one", lambda store: store.create("file", b"1"))
    found = Search({"home": None}, [actor], FolderStore).run()
    names = {tuple(sorted(path for path, _ in files)) for files, _ in found.finals}
    assert names == {("home",), ("home", "home/file"), ("home", f"home/.file.{'d' * 16}.tmp")}


def test_a_name_may_move_between_the_pages_of_a_listing() -> None:
    """One that is there at all times is listed; of two that come one after the other the second alone
    may be."""

    def make(store: Store) -> None:
        store.create("list/a", b"")
        store.create("list/z", b"")

    def listing(store: Store) -> object:
        return "".join(entry.name for entry in store.list("list"))

    files = {f"home/list/{name}": File(b"") for name in "bcdefg"}
    actors = [Actor("maker", make), Actor("reader", listing)]
    found = Search(files, actors, object_store, most_deaths=0).run()
    seen = {reports[1][1] for _, reports in found.finals}
    assert seen == {"bcdefg", "abcdefg", "abcdefgz", "bcdefgz"}
