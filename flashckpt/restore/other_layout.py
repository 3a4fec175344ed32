"""Whether what a rank has of a step is what the live state needs, as that is divided among ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flashckpt.capture.plan import local
from flashckpt.commit.steps import StepRecord
from flashckpt.format.layout import Leaf
from flashckpt.restore.imported import is_imported
from flashckpt.restore.step_reading import StepReading
from flashckpt.state.leaves import LiveLeaf
from flashckpt.state.modules import ModuleEntry
from flashckpt.state.tree import Tree


@dataclass(frozen=True)
class LiveLayout:
    """The live state as it is built on this rank, one of `world`."""

    tree: Tree
    rank: int
    world: int

    def is_of(self, world: int, leaves: Iterable[Leaf]) -> bool:
        """Whether what a rank of `world` ranks has, these leaves, is what this one needs."""
        if self.world != world or world == 1:
            return self.world == world
        leaves = list(leaves)
        saved = {name: leaf for leaf in leaves for name in (leaf.name, *leaf.aliases)}
        lives = (leaf for leaf in self.tree.found().leaves if leaf.kind in ("parameter", "buffer"))
        if any(_is_elsewhere(leaf, saved.get(leaf.name)) for leaf in lives):
            return False
        # A stage of a pipeline that has given modules to another one.
        return all(any(map(self._has_place, (leaf.name, *leaf.aliases))) for leaf in leaves)

    def _has_place(self, name: str) -> bool:
        """Whether the module that a leaf of this name belongs to is here; True of what is no module's own."""
        modules = [each for each in self.tree.entries.values() if isinstance(each, ModuleEntry)]
        owner = next((each for each in modules if name.startswith(f"{each.name}.")), None)
        return owner is None or name.rpartition(".")[0] in owner.modules

    def has(self, record: StepRecord) -> bool:
        """The same of what this rank has of a step."""
        if record.world != self.world or is_imported(record):
            return False
        mine = record.rank(self.rank)
        return self.is_of(record.world, [leaf for _, leaf, _ in (*mine.counted(), *mine.elsewhere())])

    def begin(self, record: StepRecord, threads: int) -> StepReading:
        """See `begin_for_layout`, which most starts have no need of."""
        from flashckpt.restore.merged_step import begin_for_layout

        return begin_for_layout(self.tree, record, self.rank, self.world, threads)


def _is_elsewhere(live: LiveLeaf, saved: Leaf | None) -> bool:
    if saved is None:
        return True
    here = tuple(local(live.tensor).shape)
    is_divided = saved.box is not None or live.box is not None
    # All of a parameter is here and was there, and is laid out in one dimension on one side alone (FSDP1).
    is_flat = (
        live.kind == "parameter" and len(here) != len(saved.shape) and 1 in (len(here), len(saved.shape))
    )
    return (is_divided or is_flat) and (saved.box, saved.shape) != (live.box, here)
