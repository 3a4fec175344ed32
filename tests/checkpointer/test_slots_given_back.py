"""Slots that were granted and are not used do not stay in memory, though the keeper lives on."""

from __future__ import annotations

import errno
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import flashckpt
from flashckpt import _native
from flashckpt.keeper.client import KeeperClient
from flashckpt.memory.slot import Slot
from flashckpt.memory.slots import SlotRing
from tests.checkpointer.test_bad_input import trained
from tests.checkpointer.test_loop import Job
from tests.keeper.driver import ledger
from tests.processes import keepers_of
from tests.waiting import until


def regions(runtime: Path) -> list[Path]:
    return sorted(runtime.glob("*/*/slot-*"))


class _Left(Exception):
    pass


def test_slots_that_were_ready_and_never_taken(tmp_path: Path, runtime: Path) -> None:
    def leave() -> None:
        with flashckpt.attach(tmp_path / "run", every=None, **Job().named) as checkpointer:
            checkpointer._attendant.prepare(4096, 1 << 16)
            until(lambda: checkpointer._attendant.slots.ready, "slots")
            assert len(regions(runtime)) == 3
            raise _Left

    with pytest.raises(_Left):
        leave()
    until(lambda: not regions(runtime), "the regions to go")
    assert keepers_of(runtime), "it lingers: nobody has said that the run is over"


def test_slots_that_cannot_be_made_usable(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "no memory can be faulted in")

    monkeypatch.setattr(_native, "populate", refuses)
    with flashckpt.attach(tmp_path / "run", every=None, **Job().named) as checkpointer:
        attendant = checkpointer._attendant
        attendant.prepare(4096, 1 << 16)
        until(lambda: attendant.slots.error is not None, "the failure")
        until(lambda: not regions(runtime), "the regions to go")
        monkeypatch.undo()
        attendant.prepare(4096, 1 << 16)
        until(lambda: attendant.slots.ready, "slots")
        assert len(regions(runtime)) == 3


def test_slots_that_are_written_are_not_given_back(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be granted again among others, and those then fail."""
    released: list[str] = []
    release = KeeperClient.release

    def seen(client: KeeperClient, names: Sequence[str]) -> None:
        released.extend(names)
        release(client, names)

    monkeypatch.setattr(KeeperClient, "release", seen)
    with flashckpt.attach(tmp_path / "run", every=None, **Job().named) as checkpointer:
        checkpointer.save()
        names = [path.name for path in regions(runtime)]
        checkpointer._attendant.slots.give_back([*names, "slot-00000-9-0123456789abcdef"])
        assert len(names) == 3
        assert released == ["slot-00000-9-0123456789abcdef"]


def test_a_resume_that_fails_leaves_nothing_but_what_survived(
    tmp_path: Path, runtime: Path, kill_keepers: Callable[..., None]
) -> None:
    run = tmp_path / "run"
    trained(run, [2])
    kill_keepers(remove_regions=True)
    with pytest.raises(flashckpt.MismatchError):
        flashckpt.attach(run, **Job(width=5).named)
    until(lambda: not regions(runtime), "the region that the step was read into to go")
    with flashckpt.attach(run, **Job().named) as checkpointer:
        assert (checkpointer.completed, checkpointer.resumed and checkpointer.resumed.tier) == (2, "local")


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("/slot-")


def test_without_any_grace_the_run_is_let_go_all_the_same(tmp_path: Path, runtime: Path) -> None:
    for _ in range(2):
        options = flashckpt.Options(grace="0s")
        with flashckpt.attach(tmp_path / "run", every=None, options=options, **Job().named) as checkpointer:
            checkpointer.save()
            assert mapped() == 3
        assert mapped() == 0

    def told() -> list[str]:
        return [line["event"] for line in ledger(tmp_path / "run") if line["event"] in ("close", "death")]

    until(lambda: "death" in told() or told().count("close") >= 4, "both sides to tell of both ends")
    assert "death" not in told()


@pytest.mark.parametrize("tier", ["memory", "local"])
def test_what_was_resumed_from_does_not_wait_for_the_garbage_collector(
    tmp_path: Path, runtime: Path, kill_keepers: Callable[..., None], tier: str
) -> None:
    """Training loops turn it off; and a region that is mapped still takes its memory."""
    run = tmp_path / "run"

    def leave() -> None:
        with flashckpt.attach(run, every=None, **Job().named) as checkpointer:
            checkpointer.save()
            checkpointer.wait()
            raise _Left  # so that its slots survive it

    with pytest.raises(_Left):
        leave()
    if tier == "local":
        kill_keepers(remove_regions=True)
    gc.collect()
    gc.disable()
    try:
        with flashckpt.attach(run, every=None, **Job().named) as checkpointer:
            assert checkpointer.resumed is not None
            assert checkpointer.resumed.tier == tier
            assert mapped() == 0
    finally:
        gc.enable()


class _ExchangedWhenRead(SlotRing):
    """A ring in whose place the training thread puts another one at the moment in which it is read."""

    def __init__(self, slots: Sequence[Slot], exchange: Callable[[], None]) -> None:
        super().__init__(slots)
        self._exchange: Callable[[], None] | None = exchange

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name == "slots" and (exchange := self.__dict__.get("_exchange")) is not None:
            self._exchange = None
            exchange()
        return found


def test_slots_that_are_exchanged_while_it_is_looked_for_those_to_let_go(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with flashckpt.attach(tmp_path / "run", every=None, **Job().named) as checkpointer:
        attendant, slots = checkpointer._attendant, checkpointer._attendant.slots
        let_go = slots._let_go_of_outgrown
        adopt = checkpointer._boundaries._adopt_slots
        attendant.prepare(4096, 1 << 16)
        until(lambda: slots.ready, "slots")
        adopt()
        before = set(regions(runtime))
        looked: list[SlotRing] = []

        def let_go_of_those_exchanged_meanwhile() -> None:
            if slots.ready and not looked and slots.ring is not None:
                looked.append(slots.ring)
                slots.ring = _ExchangedWhenRead(slots.ring.slots, adopt)
            let_go()

        monkeypatch.setattr(slots, "_let_go_of_outgrown", let_go_of_those_exchanged_meanwhile)
        attendant.prepare(4096, 1 << 20)
        until(lambda: looked and not slots.ready, "the exchange")
        until(lambda: not before & set(regions(runtime)), "the regions to go", 60)
        assert len(regions(runtime)) == 3
