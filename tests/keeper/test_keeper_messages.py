"""Messages longer than a packet: whole, bounded, and harmless where their peer lies about them."""

import array
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashckpt import store
from flashckpt.errors import OptionError
from flashckpt.keeper import protocol
from flashckpt.keeper.protocol import ProtocolError, receive, send
from flashckpt.options import MAX_STORAGE_BYTES, Options, Remote
from tests.conftest import keepers_of
from tests.keeper.driver import eventually, saved
from tests.keeper.fake import FakeTrainer

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        for each in (one, other):
            each.settimeout(30)
        yield one, other


@pytest.mark.parametrize("num_bytes", [10, 70_000, 4_000_000])
def test_a_message_arrives_whole_with_its_descriptors(pair: Pair, num_bytes: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"of mine")
    with open(tmp_path / "file", "rb") as file:
        send(pair[0], {"op": "hello", "text": "é" * (num_bytes // 6)}, [file.fileno()])
    message, [descriptor] = receive(pair[1])
    assert message == {"op": "hello", "text": "é" * (num_bytes // 6)}
    assert os.read(descriptor, 100) == b"of mine"
    os.close(descriptor)


def test_one_that_is_too_long_is_not_sent(pair: Pair) -> None:
    with pytest.raises(ProtocolError, match="too long"):
        send(pair[0], {"text": "x" * protocol.MAX_LONG_BYTES})
    send(pair[0], {"op": "ping"})
    assert receive(pair[1]) == ({"op": "ping"}, [])


def test_a_long_message_that_is_none_is_refused(pair: Pair) -> None:
    """A pipe would block its reader, a huge file fill its memory. No descriptor stays open."""
    huge, empty = os.memfd_create("huge"), os.memfd_create("empty")
    os.ftruncate(huge, 1 << 40)
    reading, writing = os.pipe()
    before = len(os.listdir("/proc/self/fd"))
    for descriptors in ([huge], [reading], [empty], [empty, huge]):
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        pair[0].sendmsg([protocol._LONG], rights)
        with pytest.raises(ProtocolError):
            receive(pair[1])
        assert len(os.listdir("/proc/self/fd")) == before
    for descriptor in (huge, empty, reading, writing):
        os.close(descriptor)


def test_a_keeper_takes_a_bundle_of_certificates(run: Path, tmp_path: Path, runtime: Path) -> None:
    """For the run's store and for its remote; so does the keeper that follows one that was killed."""
    bundle = {"root_certificate": "x" * (MAX_STORAGE_BYTES - 100)}
    store.give_options(str(run), bundle)
    trainer = FakeTrainer(run, runtime, remote=Remote(url=str(tmp_path / "remote"), options=bundle))
    [pid] = keepers_of(runtime)
    os.kill(pid, 9)
    eventually(trainer.client.tend)
    trainer.start()
    trainer.take_slots()
    saved(trainer, 1)
    trainer.end()
    assert keepers_of(runtime) != [pid]


def test_options_that_are_too_long_are_refused_at_once() -> None:
    assert Options(storage_options={"root_certificate": "x" * (MAX_STORAGE_BYTES - 100)})
    for name in ("storage_options", "remote_storage_options"):
        with pytest.raises(OptionError, match=f"{name} takes 1,0.*bytes as JSON"):
            Options(**{name: {"root_certificate": "x" * MAX_STORAGE_BYTES}})  # type: ignore[arg-type]
