"""A damaged step is repaired by one process while another deletes it, call by call in many orders."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from flashckpt.commit import retention
from flashckpt.commit.steps import is_committed
from flashckpt.commit.verification import verify
from flashckpt.errors import RunError
from flashckpt.format.names import manifest_path
from flashckpt.store.base import Store
from flashckpt.store.local import LocalStore
from flashckpt.store.objects import ObjectStore
from flashckpt.tiers.run_copy import copy_run
from flashckpt.tiers.step_copy import Copied, Outcome, StepCopier
from tests.commit import runs
from tests.commit.in_turn import ObjectsInTurn, SystemInTurn, Turns
from tests.commit.runs import attempt_at, half_steps, new_run


class Scene:
    """The manifest of step 100 has rotted in the target: it is copied there again, and deleted."""

    def __init__(self, folder: Path, opened: Callable[[Turns], Store]) -> None:
        self.opened = opened
        self.source = new_run(folder / "source")
        self.attempt = attempt_at(self.source)
        for step in (100, 200):
            runs.commit(self.source, step, self.attempt)
        target = opened(Turns())
        copy_run(self.source, target, all_steps=True)
        target.replace(manifest_path(100, self.attempt), b"rot")

    def both(self, turns: Turns) -> tuple[object, object]:
        """What the repair and the deletion have returned or raised."""
        self.reset()
        copier = StepCopier(self.source, self.opened(turns), repairs=True)
        other = self.opened(turns)
        return tuple(  # type: ignore[return-value]
            turns.run(
                lambda: copier.copy(100, self.attempt), lambda: retention.bury(other, 100, self.attempt)
            )
        )

    def reset(self) -> None:
        raise NotImplementedError


class LocalScene(Scene):
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        super().__init__(folder, lambda turns: LocalStore(str(folder / "target"), SystemInTurn(turns)))
        shutil.copytree(folder / "target", folder / "made")

    def reset(self) -> None:
        shutil.rmtree(self._folder / "target")
        shutil.copytree(self._folder / "made", self._folder / "target")


class ObjectScene(Scene):
    def __init__(self, folder: Path) -> None:
        self._held = dict[str, bytes]()
        super().__init__(folder, lambda turns: ObjectStore(ObjectsInTurn(turns, self._held)))
        self._made = dict(self._held)

    def reset(self) -> None:
        self._held = dict(self._made)


@pytest.fixture(params=[LocalScene, ObjectScene], ids=["local", "objects"])
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Scene:
    made: Scene = request.param(tmp_path)
    return made


def orders(calls: list[int], chance: Random) -> Iterator[list[int]]:
    """The deletion as far as each of its calls, before each call of the repair; and some in any order."""
    for before in range(calls[0] + 1):
        for between in range(1, calls[1] + 1):
            yield [0] * before + [1] * between + [0] * 999
    for _ in range(40):
        yield [chance.choice([0, 1]) for _ in range(sum(calls))]


def test_a_step_that_is_deleted_while_its_manifest_is_repaired_does_not_come_back(scene: Scene) -> None:
    ends, alone = set(), Turns([0] * 999)
    scene.both(alone)
    for order in orders(alone.calls, Random(7)):
        repaired, buried = scene.both(Turns(order))
        store = scene.opened(Turns())
        assert isinstance(repaired, Copied | RunError), repaired
        assert isinstance(buried, bool), buried
        stands = is_committed(store, 100, scene.attempt)
        assert stands is not buried, "deleted is deleted"
        assert half_steps(store) == []
        assert verify(store, all_steps=True).ok
        ends.add(repaired.outcome if isinstance(repaired, Copied) else "gone")
    assert {Outcome.REPAIRED, Outcome.BURIED} <= ends
