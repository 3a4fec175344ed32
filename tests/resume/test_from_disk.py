"""A step is read from disk straight into live tensors, or into new ones: each byte that arrives is the
step's. A start that fails once it has begun to write poisons the state. New memory is released however
`attach` ends."""

import errno
import gc
import os
import re
import shutil
import signal
import tempfile
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flashckpt
from flashckpt.checkpointer.resume import attach_to
from flashckpt.checkpointer.session import open_session
from flashckpt.errors import DamagedError, OutOfSpaceError
from flashckpt.format.records import CHUNK_BYTES
from flashckpt.keeper import node_keepers as keepers
from flashckpt.keeper.client import KeeperClient
from flashckpt.memory import memory_budget
from flashckpt.options import Environment
from flashckpt.restore import step_choice, step_reading
from flashckpt.restore.snapshot import Snapshot
from flashckpt.state.tree import Tree
from flashckpt.store.local import LocalStore
from tests.checkpointer.damaged import newest
from tests.checkpointer.voting import Voting, saving_by_hand
from tests.folders import flip
from tests.processes import keepers_of
from tests.restore.snapshots import read
from tests.waiting import until

BYTES = 4 * 1024 * 1024  # of the frozen part, which is stored as constants


class Model(nn.Module):
    """Some chunks that are trained, and some that never change."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.trained = nn.Linear(1024, 3 * 1024)
        self.frozen = nn.Linear(1024, 2 * 1024, bias=False)
        self.frozen.weight.requires_grad_(False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch

    def equals(self, other: nn.Module) -> bool:
        return all(torch.equal(a, b) for a, b in zip(self.parameters(), other.parameters(), strict=True))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one committed step, and nothing of it in memory."""
    run = tmp_path_factory.mktemp("whole") / "run"
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="flashckpt-test-", dir="/dev/shm") as runtime,
    ):
        patch.setenv("FLASHCKPT_RUNTIME", runtime)
        save(run)
        until(lambda: not keepers_of(Path(runtime)), "the keeper to leave")
    return run


@pytest.fixture
def run(whole: Path, tmp_path: Path, runtime: Path) -> Path:
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


def save(run: Path) -> int:
    """One more step, whose weights are those of its number as a seed."""
    live = Model(1)
    with flashckpt.attach(run, every=None, model=live) as checkpointer:
        step = checkpointer.completed + 1
        with torch.no_grad():
            live.trained.weight.copy_(Model(step).trained.weight)
            live.trained.bias.copy_(Model(step).trained.bias)
        checkpointer.step()
        checkpointer.save()
        checkpointer.wait()
        return checkpointer.completed


def buffers() -> int:
    """How many mappings of this process are buffers that a file is read into."""
    text = Path("/proc/self/smaps").read_text()
    found = re.findall(r"^[0-9a-f]+-\S+ rw-p .*? 0 *\n((?:\w+:.*\n)+)", text, re.MULTILINE)
    flags = [set(part.rpartition("VmFlags:")[2].split()) for part in found]
    sizes = [int(re.search(r"Rss: +(\d+)", part)[1]) for part in found]  # type: ignore[index]
    return sum({"dc", "dd"} <= flag and size > 0 for flag, size in zip(flags, sizes, strict=True))


class Made:
    """The new tensors that were read into."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.all: list[weakref.ref[torch.Tensor]] = []
        made = step_reading.new_tensors

        def seen(*arguments: Any) -> dict[str, torch.Tensor]:
            found = made(*arguments)
            self.all += map(weakref.ref, found.values())
            return found

        monkeypatch.setattr(step_reading, "new_tensors", seen)

    @property
    def left(self) -> int:
        return sum(each() is not None for each in self.all)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """No live tensor is read into directly."""
    monkeypatch.setattr(Tree, "targets", lambda tree, saved: {})
    return Made(monkeypatch)


def assert_poisoned(live: Model) -> None:
    with pytest.raises(flashckpt.StateError, match="partly the checkpoint's"):
        live(torch.ones(1))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are read into memory."""
    read, seen = LocalStore.read_chunks, list[str]()

    def read_chunks(store: LocalStore, path: str, *arguments: Any, **named: Any) -> None:
        seen.append(path)
        read(store, path, *arguments, **named)

    monkeypatch.setattr(LocalStore, "read_chunks", read_chunks)
    return seen


def resumed(run: Path, live: Model) -> str | None:
    with flashckpt.attach(run, every=None, model=live) as checkpointer:
        return checkpointer.resumed and checkpointer.resumed.tier


def test_what_it_took_is_gone_before_slots_are_asked_for(
    run: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the garbage collector: training loops turn it off."""
    slots, seen = KeeperClient._requested, list[tuple[str, int, int]]()

    def requested(client: KeeperClient, purpose: str, *arguments: Any) -> Any:
        seen.append((purpose, made.left, buffers()))
        return slots(client, purpose, *arguments)

    monkeypatch.setattr(KeeperClient, "_requested", requested)
    gc.collect()
    gc.disable()
    try:
        with flashckpt.attach(run, every=None, model=Model(2)) as checkpointer:
            assert made.left == 0
            checkpointer.step()
            checkpointer.save()
    finally:
        gc.enable()
    assert len(made.all) == 3
    assert seen == [("constants", 0, 0), ("slots", 0, 0)]


def test_each_file_is_read_once_and_parameters_take_no_memory_beside_their_own(
    run: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, live = Made(monkeypatch), Model(2)
    memory, version = live.trained.weight.data_ptr(), live.trained.weight._version
    assert resumed(run, live) == "local"
    assert live.equals(Model(1))
    assert len(reads) == len(set(reads)) == 2, "the shard and its constants"
    assert made.all == []
    assert live.trained.weight.data_ptr() == memory
    assert live.trained.weight._version > version, "autograd notices the change"


def test_the_default_device_of_a_program_does_not_matter(run: Path) -> None:
    live = Model(2)
    torch.set_default_device("meta")
    try:
        loaded = flashckpt.load(run)
        assert resumed(run, live) == "local"
    finally:
        torch.set_default_device(None)
    assert live.equals(Model(1))
    assert torch.equal(loaded["model.trained.weight"], live.trained.weight)


def test_state_of_an_optimizer_that_has_not_stepped_yet(
    tmp_path: Path, runtime: Path, kill_keepers: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is kept as it was read; after a start that failed, a step raises."""

    def job(seed: int) -> tuple[Model, torch.optim.Optimizer]:
        live = Model(seed)
        return live, torch.optim.AdamW(live.trained.parameters())

    live, optimizer = job(1)
    live.trained(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    with flashckpt.attach(tmp_path / "run", every=None, model=live, optimizer=optimizer) as checkpointer:
        checkpointer.step()
        checkpointer.save()
        checkpointer.wait()
    kill_keepers(remove_regions=True)
    again, other = job(2)
    with monkeypatch.context() as patch:
        patch.setattr("flashckpt.checkpointer.resume.fill", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            flashckpt.attach(tmp_path / "run", every=None, model=again, optimizer=other)
    assert_poisoned(again)
    with pytest.raises(flashckpt.StateError, match="ZeroDivisionError"):
        other.step()
    made, (again, other) = Made(monkeypatch), job(2)
    with flashckpt.attach(tmp_path / "run", every=None, model=again, optimizer=other):
        assert again.equals(live)
        state, there = optimizer.state[live.trained.weight], other.state[again.trained.weight]
        assert torch.equal(there["exp_avg"], state["exp_avg"])
        assert id(there["exp_avg"]) in {id(each()) for each in made.all if each() is not None}
        # The step counter, and two moments, of two parameters; gradients have their own place.
        assert made.left == 8


def test_a_wrong_byte_anywhere_is_found(run: Path) -> None:
    """Of each chunk of each file one, its first and its last among them."""
    record, places = newest(run), []
    for file in run.rglob("*.safetensors"):
        size = file.stat().st_size
        places += [(file, offset) for offset in (0, 7, CHUNK_BYTES, size // 2, size - 1)]
    assert len(places) == 10
    for file, offset in places:
        flip(file, offset)
        with pytest.raises(DamagedError):
            read(record, 0)
        flip(file, offset)
    assert buffers() == 0


@pytest.mark.parametrize("is_direct", [True, False])
def test_of_a_wrong_chunk_no_byte_reaches_the_live_state(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_direct: bool
) -> None:
    """Another chunk may: then the state is poisoned, neither trains nor begins a new run, until a start
    succeeds."""
    if not is_direct:
        monkeypatch.setattr(Tree, "targets", lambda tree, saved: {})
    file, at = run / newest(run).shard_path(0), CHUNK_BYTES + 5
    flip(file, at)
    live, before, saved = Model(2), Model(2), Model(1)
    optimizer = torch.optim.SGD(live.trained.parameters())
    with pytest.raises(flashckpt.MismatchError):  # nothing has been read
        flashckpt.attach(run, every=None, model=live, optimizer=optimizer)
    live(torch.ones(1))
    optimizer.step()
    with pytest.raises(flashckpt.UnusableRunError, match="chunk 1 does not have its checksum"):
        resumed(run, live)
    for now, here, there in zip(live.parameters(), before.parameters(), saved.parameters(), strict=True):
        assert bool(((now == here) | (now == there)).all())
    assert live.equals(before) is not is_direct
    if is_direct:
        assert_poisoned(live)
        with pytest.raises(flashckpt.StateError, match="has loaded none over it"):
            resumed(tmp_path / "other", live)
        assert_poisoned(live)
    else:
        live(torch.ones(1))
    flip(file, at)
    flashckpt.branch(run, 1)
    assert resumed(run, live) == "local"
    assert live.equals(saved)
    live(torch.ones(1))


def test_no_tensor_keeps_bytes_of_a_step_that_was_passed_over(
    run: Path, kill_keepers: Callable[..., None]
) -> None:
    """A buffer that is not persistent, for which the older step has no value."""

    class More(Model):
        def __init__(self, seed: int, value: float) -> None:
            super().__init__(seed)
            self.register_buffer("cache", torch.full((1024, 1024), value), persistent=False)

    live = More(1, 20.0)
    with flashckpt.attach(run, every=None, model=live) as checkpointer:
        checkpointer.step()
        checkpointer.save()
        checkpointer.wait()
    kill_keepers(remove_regions=True)
    record = newest(run)
    [leaf] = [leaf for _, leaf, _ in record.rank(0).counted() if leaf.name == "model.trained.weight"]
    flip(run / record.shard_path(0), record.rank(0).shard.data_start + leaf.offset)
    live = More(7, 7.0)
    assert resumed(run, live) == "local"
    assert live.equals(Model(1))
    assert bool((live.cache == 7.0).all())


@pytest.mark.long
def test_modules_inside_and_what_is_compiled_are_poisoned_too(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = Model(2)
    compiled = torch.compile(live, backend="eager")
    compiled(torch.ones(1))
    monkeypatch.setattr("flashckpt.checkpointer.resume.fill", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        resumed(run, live)
    assert_poisoned(live)
    with pytest.raises(flashckpt.StateError):
        live.trained(torch.ones(1, 1024))
    with pytest.raises(flashckpt.StateError):
        compiled(torch.ones(1))
    monkeypatch.undo()
    assert resumed(run, live) == "local"
    live.trained(torch.ones(1, 1024))
    compiled(torch.ones(1))


def test_a_module_that_takes_no_hook_hides_no_error(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And all that was opened is closed."""

    def refused(*_: object) -> None:
        raise RuntimeError("register_forward_pre_hook is not supported on ScriptModules")

    live = Model(2)
    monkeypatch.setattr(live, "register_forward_pre_hook", refused)
    with monkeypatch.context() as patch:
        patch.setattr("flashckpt.checkpointer.resume.fill", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            resumed(run, live)
    assert resumed(run, live) == "local"


def test_an_older_step_is_read_over_a_newer_one(run: Path, kill_keepers: Callable[..., None]) -> None:
    assert save(run) == 2
    kill_keepers(remove_regions=True)
    file = run / newest(run).shard_path(0)
    flip(file, file.stat().st_size - 1)  # all other chunks are right, and are in the live state by then
    live = Model(7)
    with flashckpt.attach(run, every=None, model=live) as checkpointer:
        assert checkpointer.completed == 1
    assert live.equals(Model(1))
    live(torch.ones(1))


@pytest.mark.parametrize("harm", ["cut", "longer", "gone", "link"])
def test_a_file_that_is_not_there_as_it_was_is_not_read(run: Path, harm: str) -> None:
    record = newest(run)
    file = run / record.shard_path(0)
    match harm:
        case "cut":
            os.truncate(file, file.stat().st_size - 1)
        case "longer":
            os.truncate(file, file.stat().st_size + 1)
        case "gone":
            file.unlink()
        case "link":
            file.rename(run / "moved")
            file.symlink_to(run / "moved")
    with pytest.raises((flashckpt.FlashckptError, OSError)):
        read(record, 0)
    live = Model(2)
    with pytest.raises(flashckpt.UnusableRunError):
        resumed(run, live)
    assert live.equals(Model(2))


def test_what_is_in_memory_is_not_read(run: Path, runtime: Path, reads: list[str]) -> None:
    class Killed(Exception):
        pass

    with suppress(Killed), flashckpt.attach(run, every=None, model=Model(1)) as checkpointer:
        checkpointer.step()
        checkpointer.save()
        raise Killed
    del reads[:]
    assert resumed(run, Model(2)) == "memory"
    assert reads == []


class Interrupting:
    """Part of a state during whose look at it somebody presses Ctrl-C."""

    def state_dict(self) -> dict[str, int]:
        # A shell's background job ignores the signal, and so would everything that it starts.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.signal(signal.SIGINT, before)
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def gone_after_one(read: Callable[..., Any]) -> Callable[..., Any]:
    def read_chunks(store: LocalStore, path: str, *arguments: Any, **named: Any) -> Any:
        if "/frozen-" in path:
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), path)
        return read(store, path, *arguments, **named)

    return read_chunks


@pytest.mark.parametrize(
    "kind", ["interrupt", "unsavable", "mismatch", "held", "no room", "away", "taken up"]
)
def test_nothing_of_it_is_left_however_attach_ends(
    run: Path, kind: str, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the error, with all frames that it came through, is kept, as a notebook does."""
    named: dict[str, Any] = {"model": Model(2)}
    beside, error = None, flashckpt.FlashckptError
    match kind:
        case "interrupt":
            named["own"], error = Interrupting(), KeyboardInterrupt  # type: ignore[assignment]
        case "unsavable":
            named["own"] = {"what": object()}
        case "mismatch":
            named["own"] = {"more": 1}
        case "held":
            beside = open_session(run, flashckpt.Keep(), flashckpt.Options(), Environment.read())
        case "no room":
            monkeypatch.setattr(memory_budget, "available_bytes", lambda: BYTES)
        case "away":  # once the first file was read
            monkeypatch.setattr(LocalStore, "read_chunks", gone_after_one(LocalStore.read_chunks))
            monkeypatch.setattr(step_choice, "_PAUSES_S", ())
        case "taken up":
            monkeypatch.setattr("flashckpt.checkpointer.resume.fill", lambda *_: 1 / 0)
            error = ZeroDivisionError  # type: ignore[assignment]
    gc.disable()
    try:
        with pytest.raises(error) as kept:
            flashckpt.attach(run, every=None, **named)
        assert (made.left, buffers()) == (0, 0)
        assert kept.value.__traceback__ is not None
    finally:
        gc.enable()
        if beside is not None:
            beside.close()
    assert named["model"].equals(Model(2))


@pytest.mark.parametrize("is_read", [False, True])
def test_where_the_vote_fails_nothing_of_it_is_left(run: Path, made: Made, is_read: bool) -> None:
    def vote(reason: str, snapshot: Snapshot | None) -> bool:
        assert made.left == (3 if snapshot is None else 0)
        if (snapshot is None) is is_read:
            raise ZeroDivisionError
        return True

    live, options = Model(2), flashckpt.Options()
    session = open_session(run, flashckpt.Keep(), options, Environment.read(), group=Voting(vote))
    gc.disable()
    try:
        with pytest.raises(ZeroDivisionError) as kept:
            attach_to(session, Tree({"model": live}), saving_by_hand(run), began=0.0)
        assert made.left == 0
        assert kept.value.__traceback__ is not None
    finally:
        gc.enable()
    assert live.equals(Model(2))


def test_without_room_it_is_said_how_much_there_would_have_to_be(
    run: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = set(run.glob("catalogue/*"))
    size = sum(each.nelement() * each.element_size() for each in Model(1).parameters())
    monkeypatch.setattr(memory_budget, "available_bytes", lambda: size - 1)
    live = Model(2)
    with pytest.raises(OutOfSpaceError, match="Step 1 needs") as refused:
        flashckpt.attach(run, every=None, model=live)
    assert (refused.value.needed, refused.value.available) == (size, size - 1)
    assert live.equals(Model(2))
    assert set(run.glob("catalogue/*")) == versions
    monkeypatch.setattr(memory_budget, "available_bytes", lambda: size)
    assert len(read(newest(run), 0)) == 3


def test_without_room_what_a_keeper_holds_can_be_freed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A branch goes back to a step at rest while the node still has what came after it."""
    with suppress(ZeroDivisionError), flashckpt.attach(run, every=None, model=Model(1)) as checkpointer:
        checkpointer.step()
        checkpointer.save()
        checkpointer.wait()
        raise ZeroDivisionError
    flashckpt.branch(run, 1)
    with monkeypatch.context() as patched:
        patched.setattr(memory_budget, "available_bytes", lambda: BYTES)
        patched.setattr(Tree, "targets", lambda tree, saved: {})
        with pytest.raises(OutOfSpaceError, match="flashckpt keepers --end RUN"):
            flashckpt.attach(run, every=None, model=Model(2))
    [keeper] = keepers.keepers()
    keepers.end(keeper)
    live = Model(2)
    assert resumed(run, live) == "local"
    assert live.equals(Model(1))


@pytest.mark.process
def test_a_process_that_forks_during_a_read_loads_the_right_bytes(run: Path) -> None:
    """A direct read into memory that a child copies could arrive in the child."""
    record, done, forks = newest(run), threading.Event(), list[int]()

    def reading() -> None:
        try:
            for _ in range(10):
                found = read(record, 0)
                assert found["model.trained.weight"] == expected
        finally:
            done.set()

    expected = Model(1).trained.weight.detach().numpy().tobytes()
    reader = threading.Thread(target=reading)
    reader.start()
    while not done.is_set():
        if not (child := os.fork()):
            os._exit(0)
        os.waitpid(child, 0)
        forks.append(child)
    reader.join()
    assert forks


def test_a_run_that_is_not_there_is_not_made(tmp_path: Path, runtime: Path) -> None:
    with pytest.raises(flashckpt.StateError):
        flashckpt.attach(tmp_path / "run", every=None, own={"what": object()})
    assert not (tmp_path / "run").exists()
    assert not list(runtime.iterdir())
