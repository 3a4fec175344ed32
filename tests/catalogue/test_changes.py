"""The changes of a catalogue, as pure functions. That they hold together is searched in test_search.py."""

from collections.abc import Iterable

import pytest

from flashckpt.catalogue import changes
from flashckpt.catalogue.changes import (
    ancestry,
    begin,
    commit,
    end,
    found,
    make,
    new_writer,
    newest,
    parent_of,
)
from flashckpt.errors import UnusableRunError
from flashckpt.format.catalogue import EMPTY, Catalogue, Checkpoint, Folder
from flashckpt.format.names import AttemptName, SnapshotId
from flashckpt.options import Keep

RUN = "5eed" * 4


def name(number: int) -> AttemptName:
    return AttemptName(number, f"{number:08x}")


def at(boundary: int, attempt: int = 1) -> SnapshotId:
    return SnapshotId(name(attempt), boundary)


def checkpoint(id: SnapshotId, *, writer: int = 0, bases: Iterable[Folder] = ()) -> Checkpoint:
    by = name(writer) if writer else id.attempt
    return Checkpoint(id=id, step=id.boundary, writer=by, manifest="5f2c", bases=frozenset(bases))


def begun(catalogue: Catalogue, parent: SnapshotId | None = None) -> Catalogue:
    number = catalogue.writer.number + 1
    new = new_writer(catalogue, f"{number:08x}", [])
    lineage = ancestry(catalogue, parent) if parent else ()
    return begin(catalogue, new=new, lineage=lineage)


def committed(catalogue: Catalogue, *boundaries: int, last: int = 99) -> Catalogue:
    for boundary in boundaries:
        made = checkpoint(SnapshotId(catalogue.writer, boundary))
        whole = frozenset(each.id for each in catalogue.checkpoints) | {made.id}
        keep = Keep(last=last)
        catalogue = commit(catalogue, writer=catalogue.writer, checkpoint=made, keep=keep, whole=whole)
    return catalogue


def boundaries(catalogue: Catalogue) -> list[int]:
    return [each.id.boundary for each in catalogue.checkpoints]


MADE = make(EMPTY, run_id=RUN)
THREE = committed(begun(MADE), 1, 2, 3)


def test_starts_that_die_are_counted() -> None:
    first = begun(THREE, at(3))
    again = begun(begun(first, at(3)), at(3))
    assert [each.failed_starts for each in (first, again)] == [0, 2]
    assert begun(again, at(2)).failed_starts == 0
    assert begun(committed(again, 9), at(3)).failed_starts == 0
    assert begun(end(again, writer=again.writer), at(3)).failed_starts == 0


@pytest.mark.parametrize(
    ("keep", "whole", "left"),
    [
        (Keep(last=2), (2, 3, 4), [3, 4]),
        (Keep(last=3), (1, 2, 3, 4), [2, 3, 4]),
        (Keep(last=2), (4,), [1, 2, 3, 4]),
        (Keep(last=2), (1, 4), [1, 2, 3, 4]),
        (Keep(last=1), (4,), [4]),
        (Keep(last=1, every_steps=2), (4,), [2, 4]),
    ],
)
def test_retention_counts_what_is_whole(keep: Keep, whole: tuple[int, ...], left: list[int]) -> None:
    made = checkpoint(at(4))
    after = commit(THREE, writer=name(1), checkpoint=made, keep=keep, whole=frozenset(map(at, whole)))
    assert boundaries(after) == left


def test_retention_leaves_other_branches() -> None:
    second = begun(THREE, at(1))
    made = committed(second, 4, 5, last=2)
    assert [str(each.id) for each in made.checkpoints] == [
        str(at(2)),
        str(at(3)),
        str(at(4, 2)),
        str(at(5, 2)),
    ]


def test_a_run_of_one_checkpoint_is_made_beside_nothing() -> None:
    made = found(EMPTY, run_id=RUN, checkpoint=checkpoint(at(0)))
    assert (newest(made), made.ended) == (checkpoint(at(0)), True)
    assert found(made, run_id=RUN, checkpoint=checkpoint(at(0))) is made
    assert parent_of(begun(made, at(0))) == at(0)
    with pytest.raises(UnusableRunError, match="meanwhile"):
        found(THREE, run_id=RUN, checkpoint=checkpoint(at(0)))


def test_a_lineage_does_not_grow_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "LINEAGE_KEPT", 30)
    catalogue = committed(begun(EMPTY), 1)
    for _ in range(50):
        catalogue = begun(catalogue, SnapshotId(catalogue.attempt, 1))
    lineage = dict(catalogue.lineages)[catalogue.attempt]
    assert (len(lineage), lineage[-1], len(catalogue.lineages)) == (31, at(1), 2)
