"""Cached files that are not what was written: never loaded, never written home, and no error of the run."""

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import flashckpt
from flashckpt.errors import DamagedError
from flashckpt.format.layout import PAGE
from flashckpt.memory.region import SlotHeader
from flashckpt.restore.memory_tier import SlotRange, fetch
from tests.cache.home import Home, cached_steps, files_in, slots_in
from tests.cache.loop import Training
from tests.folders import flip
from tests.waiting import abandon, until

pytestmark = pytest.mark.process
BEFORE, NEWEST = 3, 6


@pytest.fixture
def left(home: Home, cache: Path, runtime: Path, kill_keepers: Callable[..., None]) -> None:
    """A run of which the home has step 3, and the cache alone has newer ones. Nothing is in memory."""
    run = Training(home.url, cache)
    run.train(BEFORE)
    run.made.save()
    run.made.wait()
    home.shut()
    run.train(NEWEST)
    abandon(run.made)
    until(lambda: NEWEST in cached_steps(cache), "the newest step in the cache")
    kill_keepers(remove_regions=True)
    home.open()


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def image_of(path: Path) -> int:
    """A byte of the weights, in a cached slot or one in memory, or of the constants."""
    with open(path, "rb") as file:
        return SlotHeader.unpacked(file.read(PAGE)).image_offset + (1 << 19)


HARM: dict[str, Callable[[Path], object]] = {
    "image": lambda path: flip(path, image_of(path)),
    "header": lambda path: flip(path, 40),
    "cut short": truncate,
    "removed": os.unlink,
}


@pytest.mark.parametrize("what", HARM)
def test_a_damaged_slot_is_passed_over_and_never_reaches_home(
    home: Home, cache: Path, left: None, what: str
) -> None:
    for path in slots_in(cache):
        HARM[what](path)
    run = Training(home.url, cache)
    assert run.resumed == (BEFORE, "local")
    run.train(BEFORE + 2)
    run.made.close()
    assert home.steps[-1] == BEFORE + 2
    assert NEWEST not in home.steps
    assert flashckpt.verify(home.url).ok
    until(lambda: not files_in(cache), "an empty cache")


def test_damaged_constants(home: Home, cache: Path, left: None) -> None:
    [constants] = [path for path in files_in(cache) if path.name.startswith("constants-")]
    flip(constants, image_of(constants))
    try:
        run = Training(home.url, cache)
    except flashckpt.RunHeldError:  # the keeper has brought a step of the cache home meanwhile
        run = Training(home.url, cache)
    step, tier = run.resumed
    assert tier == "local"
    assert step >= BEFORE
    run.train(step + 2)
    run.made.close()
    assert flashckpt.verify(home.url).ok


def test_constants_stay_while_slots_cannot_be_opened(home: Home, cache: Path, left: None) -> None:
    """Those slots may name them."""
    [constants] = [path for path in files_in(cache) if path.name.startswith("constants-")]
    for path in slots_in(cache):
        path.chmod(0o644)
    run = Training(home.url, cache)
    assert run.resumed[0] == BEFORE
    run.train(BEFORE + 1)
    run.made.save()
    run.made.wait()
    assert constants.exists()
    run.made.close()


def test_a_copy_in_memory_is_resumed_where_the_cached_one_is_damaged_and_the_other_way_round(
    home: Home, cache: Path, runtime: Path
) -> None:
    home.shut()
    run = Training(home.url, cache)
    run.train(NEWEST)
    abandon(run.made)
    until(lambda: NEWEST in cached_steps(cache), "the newest step in the cache")
    newest = slots_in(cache)[-1]  # the keeper may remove older ones at any time
    flip(newest, image_of(newest))
    run = Training(home.url, cache)
    assert run.resumed == (NEWEST, "memory")
    run.train(NEWEST + 1)
    abandon(run.made)
    until(lambda: NEWEST + 1 in cached_steps(cache), "the next step in the cache")
    for path in list(runtime.rglob("slot-*")):
        with suppress(FileNotFoundError):  # removed by the keeper, which has it in the cache
            flip(path, image_of(path))
    run = Training(home.url, cache)
    assert run.resumed == (NEWEST + 1, "cache")
    home.open()
    run.made.close()
    assert flashckpt.verify(home.url).ok


def test_a_disk_that_gives_no_bytes_is_damage_of_the_copy(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)  # what reads from it fails
    try:
        slot: Any = SimpleNamespace(is_cached=True, image_descriptor=folder, image_offset=0, name="slot")
        with pytest.raises(DamagedError, match="cannot be read.*passed over"):
            fetch([SlotRange(slot, 0, 1 << 20)], 7, 2)
    finally:
        os.close(folder)


def test_a_timeout_of_the_program_is_no_damage_of_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step would be passed over for an older one."""
    answers = threading.Event()

    def hang(*_: object) -> int:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
        answers.wait(240)
        return 0

    def handler(*_: object) -> None:
        raise TimeoutError("of the program")

    monkeypatch.setattr(os, "preadv", hang)
    slot: Any = SimpleNamespace(is_cached=True, image_descriptor=-1, image_offset=0, name="slot")
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(TimeoutError, match="of the program"):
            fetch([SlotRange(slot, 0, 1 << 20)], 7, 2)
    finally:
        signal.signal(signal.SIGALRM, before)
        answers.set()
