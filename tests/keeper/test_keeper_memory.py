"""One request for memory has one answer: what is given, what is refused, what becomes of it when either side
dies meanwhile.
"""

import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from flashckpt.errors import KeeperError
from flashckpt.format.layout import PAGE
from flashckpt.keeper import client
from flashckpt.keeper.client import SlotGrant
from flashckpt.keeper.protocol import ELECTION_LOCK, SOCKET_NAME, close_all
from flashckpt.memory.region import SlotSize, is_region_name
from tests.descriptors import readable
from tests.keeper.driver import (
    Process,
    eventually,
    kill_keeper,
    runtime_of,
    the_keeper,
)
from tests.keeper.fake import FakeTrainer, keeper_pid
from tests.memory.policies import DEFAULT, PREFERRED, policy_of
from tests.processes import is_stopped

MIB = 1 << 20
SIZE = SlotSize(PAGE, MIB)


def beginning(run: Path, runtime: Path, **options: object) -> FakeTrainer:
    trainer = FakeTrainer(run, runtime, **options)  # type: ignore[arg-type]
    trainer.start()
    return trainer


def regions(trainer: FakeTrainer) -> set[str]:
    return {name for name in trainer.folder.names() if name.startswith("slot-")}


def names(grants: list[SlotGrant]) -> set[str]:
    close_all([grant.descriptor for grant in grants])
    return {grant.name for grant in grants}


def asked(trainer: FakeTrainer, *arguments: object) -> tuple[threading.Thread, list[object]]:
    """A request in a thread of its own, and what came of it."""
    found: list[object] = []

    def ask() -> None:
        try:
            found.append(names(trainer.client.slots(*arguments)))  # type: ignore[arg-type]
        except KeeperError as error:
            found.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread, found


def stop_at(trainer: FakeTrainer, point: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Have a keeper that stops itself at a point: its pid."""
    kill_keeper(trainer.folder)
    monkeypatch.setenv("FLASHCKPT_CRASH_AT", f"{point}:1:stop")
    trainer.client.tend()
    monkeypatch.delenv("FLASHCKPT_CRASH_AT")
    return the_keeper(trainer.folder)


def test_what_a_trainer_has_is_never_given_to_it_again(run: Path, runtime: Path) -> None:
    trainer = beginning(run, runtime)
    first = names(trainer.client.slots(2, SIZE))
    assert len(first) == 2
    more = names(trainer.client.slots(3, SIZE, have=sorted(first)))
    assert len(more) == 1
    assert not first & more
    assert names(trainer.client.slots(3, SIZE, have=sorted(first | more))) == set()
    larger = names(trainer.client.slots(3, SlotSize(PAGE, 4 * MIB), have=sorted(first | more)))
    assert len(larger) == 3
    assert not (first | more) & larger
    assert regions(trainer) == first | more | larger, "nothing of what it has goes before it says so"


def test_new_memory_has_room_to_grow_and_prefers_the_node_that_the_trainer_names(
    run: Path, runtime: Path
) -> None:
    trainer = beginning(run, runtime)
    [near] = trainer.client.slots(1, SIZE, SlotSize(PAGE, 3 * MIB), node=0)
    assert near.num_bytes == 2 * PAGE + 3 * MIB
    [other] = trainer.client.slots(2, SIZE, have=[near.name])
    shared = trainer.client.constants(SIZE, node=0)
    for grant, mode in ((near, PREFERRED), (other, DEFAULT), (shared, PREFERRED)):
        assert policy_of(grant.descriptor, grant.num_bytes)[0] == mode
    names([near, other, shared])


@pytest.mark.parametrize("point", ["memory.reserved", "slots.taken", "memory.made"])
def test_a_keeper_that_dies_meanwhile_is_replaced_and_its_successor_answers(
    point: str, run: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = beginning(run, runtime)
    pid = stop_at(trainer, point, monkeypatch)
    thread, found = asked(trainer, 3, SIZE)
    eventually(lambda: is_stopped(pid))
    os.kill(pid, signal.SIGKILL)
    thread.join(240)
    assert isinstance(found[0], set), found
    assert regions(trainer) >= found[0]
    assert len(found[0]) == 3
    assert len(regions(trainer)) <= 4, "what the dead one had made is given, or gone"


@pytest.mark.parametrize("point", ["memory.reserved", "slots.taken", "memory.made"])
def test_what_was_made_for_a_trainer_that_died_meanwhile_goes(
    point: str, run: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHCKPT_CRASH_AT", f"{point}:1:stop")
    first = Process(run, runtime, linger_s=600.0)
    monkeypatch.delenv("FLASHCKPT_CRASH_AT")
    first.do("start", None, 0, None)
    folder = runtime_of(run, runtime)
    pid = the_keeper(folder)
    first.do("ask", 3, MIB)
    eventually(lambda: is_stopped(pid))
    first.kill()
    os.kill(pid, signal.SIGCONT)
    eventually(lambda: not [name for name in folder.names() if name.startswith(("slot-", "trainer-"))])
    eventually(lambda: keeper_pid(folder) is None)
    assert not folder.exists() or not any(map(is_region_name, folder.names()))


def test_who_lets_its_run_go_waits_no_longer(run: Path, runtime: Path) -> None:
    trainer = beginning(run, runtime)
    trainer.client.stop_waiting()
    with pytest.raises(KeeperError, match="was closed"):
        trainer.client.slots(3, SIZE)


@pytest.mark.parametrize("point", ["slots.taken", "memory.made"])
def test_a_keeper_that_was_replaced_takes_no_name_from_what_the_next_has(
    point: str, run: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped while it made slots, and goes on once another has given them."""
    trainer = beginning(run, runtime, timeout_s=5.0)
    pid = stop_at(trainer, point, monkeypatch)
    thread, found = asked(trainer, 3, SIZE)
    eventually(lambda: is_stopped(pid))
    for name in (SOCKET_NAME, ELECTION_LOCK):  # as another trainer of the node does, which it does not answer
        trainer.folder.remove(name)
    thread.join(240)
    given = found[0]
    assert isinstance(given, set), given
    process = os.pidfd_open(pid)
    os.kill(pid, signal.SIGCONT)
    assert readable(process), "it finds that it is the keeper no more"
    os.close(process)
    assert given <= regions(trainer)


def test_an_answer_that_nobody_took_answers_no_other_question(
    run: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = beginning(run, runtime)
    heard = client.receive

    def interrupted(peer: socket.socket) -> tuple[dict[str, Any], list[int]]:
        monkeypatch.setattr(client, "receive", heard)
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.client.tend()
    assert trainer.client.status().keeper
