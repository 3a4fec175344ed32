"""What every store must do, whatever holds its files. A backend subclasses this and gives `store`."""

from __future__ import annotations

import multiprocessing

import pytest

from flashckpt.errors import DamagedError
from flashckpt.store.base import Entry, Store

MAX = 1 << 20


class StoreContract:
    """The fixture `store` is an empty store whose root exists."""

    def test_reads_back_what_was_created(self, store: Store) -> None:
        store.make_folder("a/b")
        data = bytes(range(256)) * 999
        assert store.create("a/b/file.json", data)
        assert store.read("a/b/file.json", MAX) == data

    def test_the_first_to_create_stands(self, store: Store) -> None:
        assert store.create("file", b"first")
        assert not store.create("file", b"second")
        assert store.read("file", MAX) == b"first"

    def test_creating_leaves_nothing_beside(self, store: Store) -> None:
        store.create("file", b"1")
        store.create("file", b"2")
        store.replace("file", b"3")
        assert store.list("") == [Entry("file", False, 1)]

    def test_replaces(self, store: Store) -> None:
        for durable in (True, False):
            store.replace("file", b"old")
            store.replace("file", b"new", durable=durable)
            assert store.read("file", MAX) == b"new"

    @pytest.mark.process
    def test_one_of_many_creates(self, store: Store) -> None:
        context = multiprocessing.get_context("fork")
        barrier, wins = context.Barrier(4), context.Queue()

        def race(who: int) -> None:
            for turn in range(25):
                barrier.wait(240)
                if store.create(f"name-{turn}", f"{who}".encode() * 100):
                    wins.put((turn, who))

        racers = [context.Process(target=race, args=(who,)) for who in range(4)]
        for racer in racers:
            racer.start()
        found = dict(wins.get(timeout=240) for _ in range(25))
        for racer in racers:
            racer.join()
            assert racer.exitcode == 0
        assert wins.empty()
        for turn in range(25):
            assert store.read(f"name-{turn}", MAX) == f"{found[turn]}".encode() * 100

    def test_missing(self, store: Store) -> None:
        for path in ("nothing", "no/such/file"):
            with pytest.raises(FileNotFoundError):
                store.read(path, MAX)
            assert not store.exists(path)
            store.remove(path)
            store.remove_tree(path)
        assert store.list("nothing") == []
        assert store.list("no/such") == []

    def test_reads_no_more_than_asked(self, store: Store) -> None:
        store.create("file", b"x" * 100)
        assert store.read("file", 100) == b"x" * 100
        with pytest.raises(DamagedError, match="at most 99"):
            store.read("file", 99)

    def test_lists_files_and_folders_by_name(self, store: Store) -> None:
        store.make_folder("z/deep")
        store.make_folder("z/also")
        store.create("z/file", b"12345")
        assert store.list("z") == [Entry("also", True, 0), Entry("deep", True, 0), Entry("file", False, 5)]

    def test_removes(self, store: Store) -> None:
        store.make_folder("a/b/c")
        store.create("a/b/c/file", b"1")
        store.create("a/keep", b"1")
        store.remove_tree("a/b")
        store.remove_tree("a/b")
        assert [entry.name for entry in store.list("a")] == ["keep"]
        assert not store.remove_empty("a")
        store.remove("a/keep")
        store.remove("a/keep")
        assert store.remove_empty("a")
        assert store.remove_empty("a")
        assert not store.exists("a")

    def test_links_share_bytes(self, store: Store) -> None:
        store.make_folder("a")
        store.create("a/source", b"bytes")
        assert store.link("a/source", "target")
        assert not store.link("a/source", "target")
        store.remove("a/source")
        assert store.read("target", MAX) == b"bytes"

    @pytest.mark.parametrize(
        "path", ["../out", "/etc/passwd", "a/../../b", "a//b", "a/./b", "a/", "x\0y", "n" * 256]
    )
    def test_no_path_leads_out(self, store: Store, path: str) -> None:
        for act in (
            lambda: store.read(path, MAX),
            lambda: store.create(path, b""),
            lambda: store.replace(path, b""),
            lambda: store.make_folder(path),
            lambda: store.remove(path),
            lambda: store.remove_tree(path),
            lambda: store.list(path),
            lambda: store.local_path(path),
            lambda: store.link(path, "target"),
        ):
            with pytest.raises(ValueError, match="no path inside a run"):
                act()
