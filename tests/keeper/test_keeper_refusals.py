"""What comes over the socket, or stands where the socket should be, and is not ours."""

import array
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashckpt.errors import KeeperError
from flashckpt.keeper import protocol
from flashckpt.keeper.client import KeeperClient
from flashckpt.keeper.server import Server
from flashckpt.memory.runtime import RuntimeFolder, enter, trainer_lock_name
from tests.descriptors import closed_after
from tests.keeper.driver import begun, eventually, saved
from tests.keeper.fake import FakeTrainer, keeper_pid, open_runtime

HELLO = {
    "op": "hello", "protocol": protocol.PROTOCOL, "rank": 0, "world": 1, "attempt": "000001-0123abcd",
    "lock": "trainer-x.lock", "ranks": [0], "keep": {"last": 3, "every_steps": None}, "linger_s": 1.0,
    "environment": {}, "stacks_signal": 0, "kill_when_stuck": False, "grace_s": 1.0,
    "released": [], "closing": False, "unsaved": False,
}  # fmt: skip
REMOTE = {
    "url": "/remote", "every": None, "keep": HELLO["keep"], "options": {}, "compress": "none",
}  # fmt: skip


@pytest.fixture
def trainer(run: Path, runtime: Path) -> Iterator[FakeTrainer]:
    made = begun(run, runtime)
    yield made
    # Whatever was thrown at the keeper, it still serves its trainer.
    saved(made, 1)
    assert made.client.restarts == 0
    made.end()


def connected(trainer: FakeTrainer) -> socket.socket:
    return connected_in(trainer.folder)


def connected_in(folder: RuntimeFolder) -> socket.socket:
    peer = closed_after(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    peer.settimeout(30)
    peer.connect(folder.reachable(protocol.SOCKET_NAME))
    return peer


def answer(peer: socket.socket) -> dict[str, Any] | None:
    """The next answer, None where the connection was closed."""
    data = peer.recv(1 << 20)
    return json.loads(data) if data else None


def refusal(peer: socket.socket) -> str:
    told = answer(peer)
    assert told["ok"] is False
    return str(told["error"])


MALFORMED: list[bytes] = [
    b"{", b"[]", b"null", b"\xff\xfe", b'{"op":1}', b'{"op":"nothing"}', b"[" * 60_000, b"9" * 60_000,
    b"x" * (protocol.MAX_MESSAGE_BYTES + 1),
    b'{"op":"memory","purpose":"slots","count":1,"needed":[1,1],"wanted":[1,1],"have":[],"node":-1}',
    b'{"op":"surviving"}',
    *(json.dumps({**HELLO, **change}).encode() for change in (
        {"lock": "../../etc/passwd"}, {"lock": "keeper.lock"}, {"lock": ""}, {"lock": "trainer-" + "x" * 99},
        {"lock": "trainer-\udc80.lock"}, {"lock": "trainer-\ud800.lock"}, {"lock": "trainer-\xe9.lock"},
        {"attempt": "1"}, {"attempt": "000001-0123abcd/../.."}, {"rank": -1}, {"rank": True}, {"rank": 1e400},
        {"world": 0}, {"ranks": []}, {"ranks": [1]}, {"ranks": "0"}, {"ranks": [0, -1]},
        {"keep": {"last": 0}}, {"linger_s": "1"}, {"linger_s": -1}, {"environment": []}, {"grace_s": None},
        {"released": ["x"] * 65}, {"closing": 1}, {"unsaved": None}, {"resumed": {"attempt": "1"}},
        {"remote": "s3://b/run"}, *({"remote": {**REMOTE, **each}} for each in (
            {"url": ""}, {"url": 5}, {"every": 0}, {"every": "often"}, {"every": 1.5}, {"every": "9" * 9999},
            {"keep": {"last": 0}}, {"keep": {"every_steps": -1}}, {"keep": 3}, {"options": []},
            {"options": {"a": {}}}, {"more": 1}, {"compress": "gzip"}, {"compress": None}, {"compress": True},
        )),
        {"protocol": "x"},
    )),
]  # fmt: skip


def test_a_malformed_message_closes_its_connection_and_no_other(trainer: FakeTrainer) -> None:
    pid = keeper_pid(trainer.folder)
    for data in MALFORMED:
        peer = connected(trainer)
        peer.send(data)
        told = answer(peer)
        assert told is None or told["ok"] is False, data[:40]
        assert told is None or answer(peer) is None, data[:40]
        trainer.client.status()
        assert keeper_pid(trainer.folder) == pid, f"another keeper serves after {data[:40]!r}"


BEYOND: list[dict[str, Any]] = [
    {"count": -1}, {"count": 10**9}, {"purpose": 3}, {"purpose": "to have it"}, {"have": "slot"},
    {"have": [1]}, {"have": ["x"] * 65}, *({"wanted": [1, size]} for size in (0, 1 << 62, 1.5)),
    *({"needed": sizes} for sizes in (None, 1, [1], [1, 0], [1, True])),
    {"node": -2}, {"node": 1024}, {"node": None},
]  # fmt: skip


def test_a_request_for_slots_is_bounded(trainer: FakeTrainer) -> None:
    sizes = {"needed": [1, 1], "wanted": [1, 1]}
    asked = {"op": "memory", "purpose": "slots", "count": 3, **sizes, "have": [], "node": -1}
    for change in BEYOND:
        peer = connected(trainer)
        hello = {**HELLO, "lock": trainer.life.name, "attempt": str(trainer.attempt)}
        peer.send(json.dumps(hello).encode())
        assert answer(peer) == {"ok": True}
        peer.send(json.dumps(asked).encode())
        assert "slots" in (answer(peer) or {}), "without the change it is a request"
        peer.send(json.dumps({**asked, **change}).encode())
        assert refusal(peer), change
        peer.close()


def test_descriptors_that_nobody_asked_for_are_closed(trainer: FakeTrainer) -> None:
    pid = keeper_pid(trainer.folder)
    trainer.client.status()

    def count() -> int:
        return len(os.listdir(f"/proc/{pid}/fd"))

    before = count()
    peer = connected(trainer)
    extra = [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", extra))]
    for op in ("ping", "status", "nothing"):
        peer.sendmsg([json.dumps({"op": op}).encode()], rights)
        answer(peer)
    peer.close()
    peer = connected(trainer)
    # As slots they are refused: a device, a file, a pipe, an empty memfd.
    wrong = [extra[0], os.open(__file__, os.O_RDONLY), os.memfd_create("slot")]
    for descriptor in wrong:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor, extra[1]]))]
        peer.sendmsg([b'{"op":"adopt"}'], rights)
        assert refusal(peer)
    peer.close()
    eventually(lambda: count() == before)
    for descriptor in {*extra, *wrong}:
        os.close(descriptor)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_process_is_refused(trainer: FakeTrainer) -> None:
    peer = connected(trainer)
    assert peer.getpeername() is not None
    # It is let through to the socket by a parent of our own; its credentials are still its own.
    for folder in (trainer.folder.path, os.path.dirname(trainer.folder.path)):
        os.chmod(folder, 0o711)
    os.chmod(os.path.dirname(os.path.dirname(trainer.folder.path)), 0o711)
    os.chmod(os.path.join(trainer.folder.path, protocol.SOCKET_NAME), 0o666)
    code = (
        "import os, socket, sys; os.setresuid(12345, 12345, 12345);"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.settimeout(30); s.connect(sys.argv[1]);"
        'print(s.send(b\'{"op":"status"}\') and s.recv(100))'
    )
    path = os.path.join(trainer.folder.path, protocol.SOCKET_NAME)
    found = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert "committed" not in found.stdout
    assert found.stdout.strip() in ("b''", "") or "Error" in found.stderr
    for folder in (trainer.folder.path, os.path.dirname(trainer.folder.path)):
        os.chmod(folder, 0o700)
    os.chmod(os.path.join(trainer.folder.path, protocol.SOCKET_NAME), 0o600)


@pytest.mark.parametrize("kind", ["file", "link", "folder", "open socket"])
def test_a_planted_socket_is_refused_and_left_alone(run: Path, runtime: Path, kind: str) -> None:
    _, identity = open_runtime(run, runtime)
    folder, life = enter(str(runtime), identity, trainer_lock_name(0))
    closed_after(folder)
    path = Path(folder.path) / protocol.SOCKET_NAME
    other = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if kind == "file":
        path.write_text("x")
    elif kind == "folder":
        path.mkdir()
    else:
        target = path if kind == "open socket" else runtime / "elsewhere"
        other.bind(str(target))
        other.listen(1)
        target.chmod(0o666 if kind == "open socket" else 0o600)
        if kind == "link":
            path.symlink_to(target)
    before = os.lstat(path)
    with pytest.raises(KeeperError, match="left as it is"):
        KeeperClient(str(run), folder, life).tend()
    assert os.lstat(path).st_ino == before.st_ino
    other.close()
    life.release(folder)


def test_a_keeper_of_another_protocol_is_told_so(trainer: FakeTrainer) -> None:
    peer = connected(trainer)
    peer.send(json.dumps({**HELLO, "protocol": protocol.PROTOCOL + 1}).encode())
    assert "two versions" in refusal(peer)


def test_nobody_changes_the_attempt_of_a_living_trainer(trainer: FakeTrainer) -> None:
    peer = connected(trainer)
    peer.send(json.dumps({**HELLO, "lock": trainer.life.name}).encode())
    assert refusal(peer)
    assert answer(peer) is None


def test_an_answer_that_is_too_long_ends_no_keeper(runtime: Path) -> None:
    folder = closed_after(RuntimeFolder.open(str(runtime), "ab" * 16))
    server = Server(folder, lambda *_: ({"names": "x" * protocol.MAX_LONG_BYTES}, ()))
    peer = connected_in(folder)
    peer.send(b'{"op":"describe"}')
    for _ in range(2):  # it is let in, then answered
        poll = select.poll()
        server.register(poll)
        server.serve([descriptor for descriptor, _ in poll.poll()])
    assert "too long" in refusal(peer)
    server.close()
