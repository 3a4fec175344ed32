"""A node of a job in this process: slots of some ranks, filled natively, and the queue that persists them."""

import os
import re
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from flashckpt import _native
from flashckpt.commit.steps import is_whole as is_listed_whole
from flashckpt.commit.steps import read_step
from flashckpt.commit.view import View
from flashckpt.format import metadata
from flashckpt.format.layout import SlotImage
from flashckpt.format.names import AttemptName, CommitName, SnapshotId
from flashckpt.memory.held_regions import Regions
from flashckpt.memory.region import SlotSize
from flashckpt.memory.runtime import RuntimeFolder
from flashckpt.memory.slot import Slot, SlotRing
from flashckpt.persist.committer import Committer, KnownRun
from flashckpt.persist.job import JobState, StepJob, StepOutcome, Trainer, few_pauses_s
from flashckpt.persist.ledger import Ledger
from flashckpt.persist.queue import Queue
from flashckpt.persist.writer import Writer
from flashckpt.store.base import Store
from tests.commit.runs import attempt_at
from tests.keeper.fake import FakeTrainer, content, layout_for
from tests.run_view import folder_of

IDENTITY = "0" * 32
_NONCE = re.compile("-[0-9a-f]+$")


class Rank(FakeTrainer):
    """A rank that fills slots which this process made. Each has another state."""

    def __init__(self, regions: Regions, rank: int, attempt: AttemptName) -> None:
        self.layout, self.attempt, self.region = layout_for(16 + rank), attempt, None
        self.image, self.sealer = SlotImage(self.layout), _native.Sealer()
        size = SlotSize(metadata.geometry(*self.sizes()).num_bytes, self.layout.num_bytes)
        self.make_slots(regions, rank, range(3), size)

    def make_slots(self, regions: Regions, rank: int, indexes: Sequence[int], size: SlotSize) -> None:
        made = regions.make(rank, indexes, size)
        assert made.error is None
        held = [regions.take(region) for region in made.regions]
        self.slots = [Slot.open(os.dup(each.slot.descriptor), map_image=True) for each in held]
        lock = f"trainer-{rank:05d}-1-{'a' * 8}.lock"
        self.owners = {each.name: each.enroll(os.getpid(), lock, lambda _: True) for each in self.slots}
        self.ring = SlotRing(self.slots)

    def close(self) -> None:
        for slot in self.slots:
            slot.close()
        self.sealer.close()


class Node:
    def __init__(
        self, store: Store, base: Path, attempt: AttemptName, ranks: tuple[int, ...], world: int,
        identity: str = IDENTITY, *, known: bool = True,
        make: Callable[[Regions, int, AttemptName], Rank] = Rank, stands: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        base.mkdir(exist_ok=True)
        self.store, self.attempt = store, attempt
        self.folder = RuntimeFolder.open(str(base), identity)
        nonce = secrets.token_hex(4)
        self.regions = Regions(self.folder, nonce)
        self.ranks = {rank: make(self.regions, rank, attempt) for rank in ranks}
        self.told: list[tuple[int, JobState]] = []
        self.whys: list[str] = []
        self.outcomes: list[StepOutcome] = []
        self.ledger = Ledger(store)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        run = KnownRun(store, stands)
        self.queue = Queue(
            self.regions, Writer(run, nonce), Committer(run), self._wake, self.ledger, notify=self._told,
            pauses=lambda tries: None if few_pauses_s(tries) is None else 0.01,
        )  # fmt: skip
        self.trainers = [
            Trainer(lock=f"{rank}", rank=rank, world=world, ranks=ranks, attempt=attempt) for rank in ranks
        ]
        if known:
            self.queue.set_trainers(self.trainers)

    def _told(self, job: StepJob, outcome: StepOutcome) -> None:
        self.told.append((job.step, outcome.state))
        self.whys.append(outcome.message)
        self.outcomes.append(outcome)

    def seal(self, step: int, *ranks: int, persist: bool = True, boundary: int | None = None) -> list[Slot]:
        """The step in a slot of each rank (of all, if none is named). A boundary has the step's number unless
        another is named."""
        for rank in self.ranks.values():
            rank.boundary = boundary
        return [self.ranks[rank].snapshot(step, persist=persist)[0] for rank in ranks or self.ranks]

    def run(self) -> None:
        self.queue.run_to_idle(lambda: None)

    def close(self, *, leaves_memory: bool = False) -> None:
        """`leaves_memory`: as a kill of all its processes does."""
        for rank in self.ranks.values():
            rank.close()
        for held in self.regions.slots() if not leaves_memory else ():
            self.regions.remove(held)
        self.regions.close()
        self.ledger.close()
        self.queue.close()
        self.folder.close()
        os.close(self._wake)


MakeNode = Callable[..., Node]


def begun(store: Store, world: int, parent: CommitName | None = None) -> AttemptName:
    """An attempt that is trained, which has resumed from `parent`."""
    return attempt_at(store, parent, world=world)


def name_of(step: int, attempt: AttemptName, boundary: int | None = None) -> CommitName:
    """The commit of a step. A boundary has the step's number unless another is named."""
    return CommitName(step, attempt, step if boundary is None else boundary)


def is_committed(store: Store, step: int, attempt: AttemptName, boundary: int | None = None) -> bool:
    """Whether a step is a checkpoint with all its files."""
    return is_listed_whole(View.of(store), name_of(step, attempt, boundary))


def visible_steps(store: Store) -> list[int]:
    return [each.step for each in View.of(store).visible()]


def until_told(node: Node, row: tuple[int, JobState]) -> None:
    while row not in node.told:
        node.run()


def files(store: Store, boundary: int, attempt: AttemptName) -> list[str]:
    """The data files of a snapshot without their nonces, sorted."""
    names = [entry.name for entry in store.list(folder_of(store, SnapshotId(attempt, boundary)))]
    return sorted(_NONCE.sub("", name.partition(".")[0]) for name in names)


def is_whole(store: Store, step: int, attempt: AttemptName, world: int, boundary: int | None = None) -> bool:
    """Whether a step is committed and each rank's shard holds, byte for byte, the content of that rank."""
    record = read_step(store, name_of(step, attempt, boundary))
    assert record.world == world
    for rank in range(world):
        found = record.rank(rank)
        data, layout = (Path(store.url) / record.shard_path(rank)).read_bytes(), layout_for(16 + rank)
        assert found.shard.leaves == layout.leaves
        assert data[: layout.data_start] == layout.header
        for leaf in layout.leaves:
            start = layout.data_start + leaf.offset
            if data[start : start + leaf.num_bytes] != content(leaf, step):
                return False
    return True
