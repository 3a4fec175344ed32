"""A shard is read into its slot while the slot's memory is still being taken; whatever becomes of that
memory, what is loaded is the shard, or nothing is.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flashckpt
from flashckpt.errors import OutOfRoomError
from flashckpt.keeper.client import KeeperClient, SlotGrant
from flashckpt.restore.shard_reading import ShardReading

Slot = Callable[..., SlotGrant]


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(1024, 9 * 1024)  # 36 MiB, which is nine chunks


@pytest.fixture
def run(tmp_path: Path, runtime: Path, kill_keepers: Callable[..., None]) -> Path:
    """A run with one committed step, and nothing of it in memory."""
    with flashckpt.attach(tmp_path / "run", every=None, model=model(1)) as checkpointer:
        checkpointer.save()
        checkpointer.wait()
    kill_keepers(remove_regions=True)
    return tmp_path / "run"


def resumed(run: Path) -> nn.Module:
    live = model(2)
    with flashckpt.attach(run, every=None, model=live) as checkpointer:
        assert checkpointer.resumed is not None
        assert checkpointer.resumed.tier == "local"
    return live


def assert_whole(live: nn.Module) -> None:
    assert all(torch.equal(a, b) for a, b in zip(live.parameters(), model(1).parameters(), strict=True))
    assert not [thread for thread in threading.enumerate() if thread.name == "flashckpt-read"]


def replaced(monkeypatch: pytest.MonkeyPatch, around: Callable[[Slot, Any], SlotGrant]) -> None:
    """Change what a request for a slot to read into meets."""
    slot_to_read = KeeperClient.slot_to_read

    def asked(client: KeeperClient, *sizes: Any, early: Any = None) -> SlotGrant:
        def ask(early: Any) -> SlotGrant:
            return slot_to_read(client, *sizes, early=early)

        return around(ask, early)

    monkeypatch.setattr(KeeperClient, "slot_to_read", asked)


def test_it_is_read_early(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bool] = []
    begun_in = ShardReading._begun_in

    def seen(reading: ShardReading, held: Any) -> Any:
        found = begun_in(reading, held)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(ShardReading, "_begun_in", seen)
    assert_whole(resumed(run))
    assert taken == [True]


def test_a_slot_that_is_another_one_is_read_into_anew(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper died while it took memory: the one that replaced it gives a slot of its own."""
    orphan = os.memfd_create("orphan")
    os.posix_fallocate(orphan, 0, 64 << 20)

    def around(ask: Any, early: Any) -> SlotGrant:
        early(os.dup(orphan), 8192)
        found: SlotGrant = ask(None)
        return found

    replaced(monkeypatch, around)
    assert_whole(resumed(run))
    os.close(orphan)


def test_without_a_slot_nothing_is_read_any_more(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = os.memfd_create("empty")

    def around(ask: Any, early: Any) -> SlotGrant:
        early(os.dup(empty), 8192)
        raise OutOfRoomError("no room", needed=2, available=1)

    replaced(monkeypatch, around)
    live = model(2)
    with pytest.raises(OutOfRoomError):
        flashckpt.attach(run, every=None, model=live)
    assert all(torch.equal(a, b) for a, b in zip(live.parameters(), model(2).parameters(), strict=True))
    assert not [thread for thread in threading.enumerate() if thread.name == "flashckpt-read"]
    os.close(empty)


def test_a_flipped_byte_is_found_on_the_way(run: Path) -> None:
    [shard] = run.rglob("*.safetensors")
    with open(shard, "r+b") as file:
        file.seek(20 << 20)
        byte = file.read(1)[0]
        file.seek(20 << 20)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(flashckpt.UnusableRunError, match="is not what was committed"):
        flashckpt.attach(run, every=None, model=model(2))
