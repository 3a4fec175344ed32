"""Claims, starts, the alive counter."""

from __future__ import annotations

import multiprocessing
import os
import re
import socket
from pathlib import Path

import pytest

from flashckpt.commit.attempts import (
    alive,
    attempts,
    beat,
    check_newest,
    claim,
    mark_ended,
    newest_claimed,
    newest_started,
    open_run,
    read_start,
    started_after,
)
from flashckpt.commit.catalogue import Catalogue
from flashckpt.commit.starting import report_repeated, start
from flashckpt.errors import FormatError, RunError, SupersededError, UnusableRunError
from flashckpt.format.names import ATTEMPTS, RUN, AttemptName, claim_path, start_path
from flashckpt.store import open_store
from flashckpt.store.base import Entry
from flashckpt.store.local import LocalStore
from tests.commit.runs import HOLDER, attempt_at, commit, new_run, newest_of, of_format


def test_numbers_go_up_and_names_are_unique(tmp_path: Path) -> None:
    store = new_run(tmp_path / "run")
    assert newest_claimed(store) is None
    names = [claim(store, HOLDER) for _ in range(3)]
    assert [name.number for name in names] == [1, 2, 3]
    assert len({name.nonce for name in names}) == 3
    assert newest_claimed(store) == names[-1]
    assert newest_started(store) is None


@pytest.mark.process
def test_processes_that_race_for_a_claim_all_get_their_own(tmp_path: Path) -> None:
    store = new_run(tmp_path / "run")
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()

    def race() -> None:
        looks = []
        barrier.wait(240)
        for _ in range(10):
            looks.clear()
            name = claim(store, HOLDER, check=lambda: looks.append(1))
            results.put((str(name), len(looks)))

    racers = [context.Process(target=race) for _ in range(4)]
    for racer in racers:
        racer.start()
    got = [results.get(timeout=240) for _ in range(40)]
    for racer in racers:
        racer.join()
    assert sorted(AttemptName.parse(name).number for name, _ in got) == list(range(1, 41))
    assert {str(info.name) for info in attempts(store)} == {name for name, _ in got}
    assert all(looks >= 1 for _, looks in got)


def test_the_loser_of_a_race_looks_again(tmp_path: Path) -> None:
    store = new_run(tmp_path / "run")
    looked = []

    def check() -> None:
        # The other claims between our look at the numbers and our claim, the first two times.
        looked.append(newest_claimed(store))

    class Beaten(LocalStore):
        def create(self, path: str, data: bytes) -> bool:
            if newest_claimed(store) is None or newest_claimed(store).number < 2:
                claim(store, HOLDER)
            return super().create(path, data)

    name = claim(Beaten(store.url), HOLDER, check)
    assert name.number == 3
    assert [each.number if each else 0 for each in looked] == [0, 1, 2]


def test_what_the_check_raises_ends_the_claiming(tmp_path: Path) -> None:
    store = new_run(tmp_path / "run")

    def refuse() -> None:
        raise RunError("held")

    with pytest.raises(RunError, match="held"):
        claim(store, HOLDER, refuse)
    assert newest_claimed(store) is None


def test_a_start_after_a_newer_claim_is_refused(tmp_path: Path) -> None:
    store = new_run(tmp_path / "run")
    first, second = claim(store, HOLDER), claim(store, HOLDER)
    with pytest.raises(SupersededError, match=str(second)):
        start(store, first, None, 0, 1, Catalogue.of(store))
    with pytest.raises(SupersededError):
        check_newest(store, first)
    check_newest(store, second)
    assert started_after(store, first) is None
    start(store, second, None, 0, 1, Catalogue.of(store))
    assert started_after(store, first) == second
    with pytest.raises(SupersededError, match="already started"):
        start(store, second, None, 0, 1, Catalogue.of(store))


def test_alive_and_how_it_ends(tmp_path: Path) -> None:
    store = new_run(tmp_path / "run")
    name = attempt_at(store)
    assert alive(store, name).count == 0
    beat(store, name, 7)
    assert (alive(store, name).count, alive(store, name).ended) == (7, "")
    mark_ended(store, name, "dead")
    assert (alive(store, name).count, alive(store, name).ended) == (7, "dead")
    assert not attempts(store)[0].closed
    mark_ended(store, name, "closed")
    assert attempts(store)[0].closed


def test_a_damaged_claim_does_not_free_its_number(tmp_path: Path) -> None:
    store = new_run(tmp_path / "run")
    name = attempt_at(store)
    (tmp_path / "run" / claim_path(1)).write_bytes(b"{}")
    assert newest_claimed(store) == newest_started(store) == name
    assert [(info.name, info.claim) for info in attempts(store)] == [(name, None)]
    assert claim(store, HOLDER).number == 2


def test_a_damaged_start_is_never_a_start_that_was_not(tmp_path: Path) -> None:
    store = new_run(tmp_path / "run")
    name = attempt_at(store)
    path = tmp_path / "run" / start_path(name)
    path.write_bytes(path.read_bytes().replace(b'"step":0', b'"step":1'))
    [found] = attempts(store)
    assert (bool(found.problem), found.start) == (True, None)
    assert "checksum" in found.problem
    catalogue = Catalogue.of(store)
    assert catalogue.newest_started == name
    assert "checksum" in str(catalogue.problem)


def test_run_json(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path / "a" / "run"))
    with pytest.raises(RunError, match="is no run"):
        open_run(store, create=False)
    assert not (tmp_path / "a").exists()
    run = open_run(store, create=True)
    assert open_run(store, create=True) == open_run(store, create=False) == run
    path = tmp_path / "a" / "run" / "run.json"
    path.unlink()
    attempt_at(store)
    with pytest.raises(UnusableRunError, match="not taken for a fresh run"):
        open_run(store, create=True)


@pytest.mark.parametrize("version", [2, 4, 9])
def test_another_format_is_refused(tmp_path: Path, version: int) -> None:
    store = new_run(tmp_path)
    (tmp_path / RUN).write_bytes(of_format(version, (tmp_path / RUN).read_bytes()))
    with pytest.raises(FormatError, match=f"format {version}.*Nothing was changed"):
        open_run(store, create=True)


def _make(kind: str, path: Path) -> None:
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("000001.json")
    elif kind == "dangling link":
        path.symlink_to("nowhere")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))


@pytest.mark.parametrize("url", ["{}", "local://{}"])
@pytest.mark.parametrize("kind", ["folder", "link", "dangling link", "pipe", "socket"])
def test_something_with_the_name_of_the_next_claim_that_is_no_file(
    tmp_path: Path, url: str, kind: str
) -> None:
    """It is not tried again for ever."""
    store = open_store(url.format(tmp_path / "run"))
    open_run(store, create=True)
    mark_ended(store, claim(store, HOLDER), "closed")
    _make(kind, tmp_path / "run" / claim_path(2))
    tries = []

    def check() -> None:
        tries.append(1)
        assert len(tries) < 10, "it spins"

    with pytest.raises(
        UnusableRunError, match=r"attempts/000002.json.*is a folder, a link or.*Remove or rename it"
    ):
        claim(store, HOLDER, check)
    if kind == "folder":
        (tmp_path / "run" / claim_path(2)).rmdir()
    else:
        (tmp_path / "run" / claim_path(2)).unlink()
    assert claim(store, HOLDER).number == 2


class OldListing(LocalStore):
    """Does not list a new claim for some time, as an NFS client does that has listed the folder before."""

    times = 8

    def list(self, folder: str, named: re.Pattern[str] | None = None) -> list[Entry]:
        self.times -= folder == ATTEMPTS
        return [] if folder == ATTEMPTS and self.times >= 0 else super().list(folder, named)


def test_a_claim_that_an_old_listing_does_not_show_is_waited_for(tmp_path: Path) -> None:
    """It is another job's: an error that asks to remove it would cost that job its run."""
    store = OldListing(new_run(tmp_path / "run").url)
    first = claim(LocalStore(store.url), HOLDER)
    assert claim(store, HOLDER).number == first.number + 1


def test_no_attempt_takes_a_number_that_no_listing_finds(tmp_path: Path) -> None:
    """What such an attempt commits would not be seen by any start."""
    store = new_run(tmp_path / "run")
    last = claim(store, HOLDER, above=999_999_998)
    assert newest_claimed(store) == last
    with pytest.raises(UnusableRunError, match="999999999.*Nothing was changed"):
        claim(store, HOLDER)
    assert newest_claimed(store) == last


def test_a_foreign_file_with_the_name_of_the_next_claim(tmp_path: Path) -> None:
    """It takes its number, as a claim that has rotted does: the next start says which file it is."""
    store = new_run(tmp_path / "run")
    mark_ended(store, claim(store, HOLDER), "closed")
    (tmp_path / "run" / claim_path(2)).write_bytes(b"something else")
    assert claim(store, HOLDER).number == 3


@pytest.mark.parametrize("between", ["", "closed", "committed", "branched"])
def test_starts_at_one_step_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, between: str
) -> None:
    """Until one is closed in order, saves a step, or begins elsewhere. The sweep leaves few records."""
    store = new_run(tmp_path / "run")
    first = attempt_at(store)
    for step in (100, 200):
        commit(store, step, first)
    older, parent = (newest_of(store, step) for step in (100, 200))
    counted = []
    for number in range(6):
        name = attempt_at(store, parent)
        record = read_start(store, name)
        assert record is not None
        counted.append(record.again)
        report_repeated(store, record, Catalogue.of(store))
        if number == 2 and between == "closed":
            mark_ended(store, name, "closed")
        if number == 2 and between == "committed":
            commit(store, 300, name)
            parent = newest_of(store, 300)
        if number == 2 and between == "branched":
            parent = older
    assert counted == ([0, 1, 2, 3, 4, 5] if not between else [0, 1, 2, 0, 1, 2])
    lines = [each for each in caplog.messages if "starts in a row" in each]
    assert [each.split(" ", 1)[0] for each in lines] == ([] if between else ["4", "5", "6"])
    if lines:
        assert f"`flashckpt branch {store.url} 100`" in lines[0]
