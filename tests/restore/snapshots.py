"""Snapshots of a live state, without a run, and the bytes of a rank in a step of a run."""

from collections.abc import Iterable

from torch import Tensor

from flashckpt import _native
from flashckpt.commit.steps import StepRecord
from flashckpt.format.layout import Leaf
from flashckpt.format.names import AttemptName
from flashckpt.restore.filling import LiveLayout, check_fits
from flashckpt.restore.snapshot import Snapshot
from flashckpt.restore.step_reading import StepReading
from flashckpt.state.tree import Tree
from tests import run_view
from tests.state.image import Image, raw_bytes


def snapshot_of(image: Image) -> Snapshot:
    """The snapshot of an image, in memory."""
    saved = image.saved()
    tensors = {name: saved.tensor(name) for name in saved.leaves}
    digests = {name: digest_of(each) for name, each in tensors.items()}
    return Snapshot(
        step=4, attempt=AttemptName(1, "00000000"), boundary=4, tier="memory", leaves=saved.leaves,
        digests=digests, values={"state": saved.value}, tensors=tensors,
    )  # fmt: skip


def taken(tree: Tree, record: run_view.Record, rank: int, world: int, *, is_direct: bool = True) -> Snapshot:
    """A step of another layout, read for `rank` of `world`; into its live tensors if `is_direct`."""
    reading = LiveLayout(tree, rank, world).begin(record)
    check_fits(tree, reading.snapshot)
    return reading.read(record.store, 2, tree.targets(reading.snapshot.saved) if is_direct else {})


class AnyLayout(LiveLayout):
    """The layout of any step."""

    def __init__(self) -> None:
        super().__init__(Tree({}), 0, 1)

    def is_of(self, world: int, leaves: Iterable[Leaf]) -> bool:
        return True

    def has(self, record: StepRecord) -> bool:
        return True


def digest_of(tensor: Tensor) -> int:
    data = raw_bytes(tensor)
    return _native.digest(_native.address_of(data) if data else 0, len(data))


def read(record: run_view.Record, rank: int) -> dict[str, bytes]:
    """Each leaf of a rank, read from storage."""
    reading = StepReading.of_own(record, rank, is_alone=True)
    return content(reading.read(record.store, 1))


def content(snapshot: Snapshot) -> dict[str, bytes]:
    """Each leaf of a snapshot, which has its digest."""
    assert {name: digest_of(each) for name, each in snapshot.tensors.items()} == snapshot.digests
    return {name: raw_bytes(each) for name, each in snapshot.tensors.items()}
