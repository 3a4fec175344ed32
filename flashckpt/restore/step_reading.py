"""A step at rest that is being read for one rank, in two turns: first what needs no other rank of its node,
then what is left, from wherever its chunks are to be had."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from flashckpt.commit.steps import StepRecord
from flashckpt.errors import DamagedError
from flashckpt.format.records import Contents
from flashckpt.restore.box_gathering import Gathering, Source
from flashckpt.restore.snapshot import Snapshot
from flashckpt.restore.step_image import StepImage, image_of
from flashckpt.restore.step_leaves import BoxRegion, Piece, StepFile

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepReading:
    """`left` goes to the first memory of the image, and `made` gives the snapshot once it is there. `held`
    has the files that are in memory already, whole and verified, by their paths."""

    image: StepImage
    left: Gathering
    made: Callable[[], Snapshot]
    held: Mapping[str, tuple[Contents, memoryview]] = field(default_factory=dict)

    @classmethod
    def of_own(cls, image: StepImage) -> StepReading:
        """Of a step that this rank has made itself: what others wrote for it is left, unless it was read."""
        record, rank = image.record, image.rank
        files, left = dict(record.files(rank)), Gathering()
        layout, _ = image_of(record, rank)
        starts = {leaf.name: start for leaf, start in zip(layout.leaves, layout.starts(), strict=True)}
        for path, contents, leaf, digest in () if image.is_whole else record.leaves(rank):
            if path not in files and leaf.num_bytes:
                region = BoxRegion.of(leaf)
                piece = Piece(region, rank, StepFile(path, contents), leaf, digest)
                left.take(leaf, starts[leaf.name], [(piece, region)])
        held = {path: (contents, image.images[index]) for index, (path, contents) in enumerate(files.items())}
        return cls(image, left, lambda: Snapshot.of(image), held)

    def finish(self, source: Source, threads: int) -> Snapshot:
        """Read what is left. Where another source than the step's store has something that is not what was
        committed, the store's counts. Raises what `Gathering.run` does, and MismatchError; it may be tried
        again."""
        [into, *_], store = self.image.images, self.record.store
        try:
            self.left.run(source, into, threads)
        except DamagedError as error:
            if source is store:
                raise
            log.warning("step %d is read from storage by this rank alone: %s", self.record.step, error)
            self.left.run(store, into, threads)
        return self.made()

    def drop(self) -> None:
        """It is not taken after all."""
        self.image.discard()

    @property
    def record(self) -> StepRecord:
        return self.image.record
