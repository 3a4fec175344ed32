"""The ledger's size: how an attempt began and its newest lines stay, and no run fills a disk with them."""

import json
from pathlib import Path

import pytest

from flashckpt.persist.ledger import FILE_BYTES, Ledger, file_names, lines_of
from flashckpt.store.base import Store
from tests.commit.runs import new_run
from tests.events import ledger

ATTEMPT = "000001-0123abcd"
SMALL = 4096


@pytest.fixture
def store(run: Path) -> Store:
    return new_run(run)


def write(store: Store, steps: range, file_bytes: int = SMALL) -> None:
    book = Ledger(store, file_bytes=file_bytes)
    for step in steps:
        book.add(ATTEMPT, "commit", step=step)
    book.close()
    assert book.dropped == 0


def sizes(run: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in (run / "events").iterdir()}


def test_the_oldest_and_the_newest_lines_stay_within_the_bound(store: Store, run: Path) -> None:
    most = []
    for start in range(0, 3000, 500):
        write(store, range(start, start + 500))
        most.append(sum(sizes(run).values()))
    assert max(most) <= 3 * SMALL
    steps = [line["step"] for line in ledger(run)]
    assert steps == sorted(steps), "in the order of file names"
    gap = next(i for i, step in enumerate(steps) if step != i)
    assert gap * 40 > SMALL // 2, "how the attempt began"
    newest = steps[gap:]
    assert newest == list(range(newest[0], 3000)), "the newest, without a hole"
    assert len(newest) >= gap, "a file's worth of them at least"


def test_a_ledger_below_the_bound_is_one_file(store: Store, run: Path) -> None:
    write(store, range(50), file_bytes=FILE_BYTES)
    assert list(sizes(run)) == [file_names(ATTEMPT)[0]]
    assert [line["step"] for line in ledger(run)] == list(range(50))


def test_every_line_is_whole_and_a_long_one_fits_anywhere(store: Store, tmp_path: Path) -> None:
    book = Ledger(store, file_bytes=256)
    for step in range(20):
        book.add(ATTEMPT, "torn", step=step, leaves=["x" * 300])
    book.close()
    names = file_names(ATTEMPT)
    lines = [(tmp_path / "run/events" / name).read_text().splitlines() for name in names]
    assert [len(each) for each in lines] == [1, 1, 1]
    assert [json.loads(each[0])["step"] for each in lines] == [0, 18, 19]


def test_attempts_do_not_share_files(store: Store, run: Path) -> None:
    book = Ledger(store, file_bytes=SMALL)
    for step in range(300):
        book.add(ATTEMPT, "commit", step=step)
        book.add(None, "adopt", step=step)
    book.close()
    assert len(sizes(run)) == 6
    assert set(file_names("keeper")) < set(sizes(run))


def test_two_keepers_that_wrote_at_once_beyond_the_bound_hide_no_line(store: Store, tmp_path: Path) -> None:
    """Each found room for its own line, and there was room for one."""
    line = json.dumps({"event": "resume", "step": 7}).encode() + b"\n"
    for name in file_names(ATTEMPT):
        store.append(f"events/{name}", line * (FILE_BYTES // len(line) + 1), FILE_BYTES)
    write(store, range(1), file_bytes=FILE_BYTES)
    steps = [found["step"] for found in lines_of(store, ATTEMPT)]
    assert steps.count(7) == 2 * (FILE_BYTES // len(line) + 1)
    assert steps[-1] == 0


def test_half_of_a_last_line_is_no_line_and_costs_no_other(store: Store, run: Path, tmp_path: Path) -> None:
    """As who reads beside a keeper finds it, and as a full disk leaves it."""
    write(store, range(3))
    path = tmp_path / "run/events" / file_names(ATTEMPT)[0]
    whole = path.read_bytes()
    before = len(whole[: whole[:-1].rfind(b"\n") + 1])
    for length in range(before, len(whole)):
        path.write_bytes(whole[:length])
        # All of it but the end of the line: for a ledger that is a line, for who compares files not yet.
        assert [line["step"] for line in lines_of(store, ATTEMPT)] == [0, 1, 2][
            : 2 + (length + 1 == len(whole))
        ]
        assert [line["step"] for line in ledger(run)] == [0, 1]
    path.write_bytes(whole[: before + 9])
    write(store, range(3, 5))
    assert [line["step"] for line in lines_of(store, ATTEMPT)] == [0, 1, 4]
