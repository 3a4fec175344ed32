"""The changes of a catalogue, as pure functions. That they hold together is searched in test_search.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import pytest

from flashckpt.catalogue.changes import (
    LINEAGE_KEPT,
    Hopeless,
    Keep,
    MovedError,
    Spared,
    adopt,
    ancestry,
    begin,
    branch,
    clear,
    commit,
    end,
    follow,
    found,
    hopeless,
    make,
    new_writer,
    newest,
    parent_of,
    quarantine,
    rebuild,
    relate,
    retain,
    spared,
    visible,
)
from flashckpt.errors import NoSuchStepError, SupersededError, UnusableRunError
from flashckpt.format.catalogue import EMPTY, NO_ATTEMPT, Catalogue, Checkpoint, Folder
from flashckpt.format.names import AttemptName, SnapshotId

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
        keep = Keep(last=last, whole=whole)
        catalogue = commit(catalogue, writer=catalogue.writer, checkpoint=made, keep=keep)
    return catalogue


def boundaries(catalogue: Catalogue) -> list[int]:
    return [each.id.boundary for each in catalogue.checkpoints]


MADE = make(EMPTY, run_id=RUN)
THREE = committed(begun(MADE), 1, 2, 3)
CHANGES: list[tuple[Catalogue, Callable[[Catalogue], Catalogue]]] = [
    (EMPTY, partial(make, run_id=RUN)),
    (MADE, partial(begin, new=new_writer(MADE, "11111111", []), lineage=())),
    (THREE, partial(begin, new=new_writer(THREE, "22222222", []), lineage=(at(3),))),
    (THREE, partial(branch, new=new_writer(THREE, "22222222", []), parent=at(1))),
    (THREE, partial(commit, writer=name(1), checkpoint=checkpoint(at(4)), keep=Keep())),
    (THREE, partial(adopt, found=(checkpoint(at(5)), checkpoint(at(4))))),
    (THREE, partial(quarantine, checkpoint=THREE.checkpoints[1], why="two reads differ")),
    (THREE, partial(end, writer=name(1))),
    (EMPTY, partial(follow, new=new_writer(EMPTY, "33333333", []), lead=THREE)),
    (
        EMPTY,
        partial(
            rebuild,
            new=new_writer(EMPTY, "33333333", [name(1)]),
            run_id=RUN,
            found=THREE.checkpoints,
            lineages={name(1): ()},
        ),
    ),
]


@pytest.mark.parametrize(("before", "change"), CHANGES, ids=[c.func.__name__ for _, c in CHANGES])
def test_a_change_makes_one_version_and_is_idempotent(
    before: Catalogue, change: Callable[[Catalogue], Catalogue]
) -> None:
    made = change(before)
    assert made.version == before.version + 1
    assert change(made) is made
    assert Catalogue.from_bytes(made.to_bytes(), "file") == made


def test_an_attempt_begins_from_a_snapshot() -> None:
    second = begun(THREE, at(2))
    assert second.writer == second.attempt == name(2)
    assert parent_of(second) == at(2)
    assert [each.id for each in visible(second)] == [at(1), at(2)]
    assert newest(begun(committed(second, 9), at(9, 2))) == checkpoint(at(9, 2))
    assert parent_of(begun(MADE)) is None


def test_the_number_is_above_all_that_is_there() -> None:
    new = new_writer(THREE, "5f2c0a1b", [name(1), name(7)], 3)
    assert (new.name.number, new.seen, new.foreign) == (8, THREE.version, {name(7)})


def test_a_new_writer_is_bound_to_the_version_it_was_chosen_for() -> None:
    new = new_writer(THREE, "5f2c0a1b", [])
    for change in (partial(begin, lineage=()), partial(branch, parent=at(1))):
        with pytest.raises(MovedError) as moved:
            change(committed(THREE, 4), new=new)  # type: ignore[call-arg]
        assert moved.value.catalogue == committed(THREE, 4)


def test_files_without_a_catalogue_are_no_fresh_run() -> None:
    new = new_writer(EMPTY, "5f2c0a1b", [name(4)])
    with pytest.raises(UnusableRunError, match="flashckpt recover"):
        follow(EMPTY, new=new, lead=THREE)


def test_starts_that_die_are_counted() -> None:
    first = begun(THREE, at(3))
    again = begun(begun(first, at(3)), at(3))
    assert [each.failed_starts for each in (first, again)] == [0, 2]
    assert begun(again, at(2)).failed_starts == 0
    assert begun(committed(again, 9), at(3)).failed_starts == 0
    assert begun(end(again, writer=again.writer), at(3)).failed_starts == 0


def test_only_the_writer_commits_and_in_order() -> None:
    second = begun(THREE, at(3))
    with pytest.raises(SupersededError, match="taken over"):
        commit(second, writer=name(1), checkpoint=checkpoint(at(4)), keep=Keep())
    assert commit(THREE, writer=name(1), checkpoint=checkpoint(at(2)), keep=Keep()) is THREE
    older = checkpoint(SnapshotId(name(1), 0))
    assert commit(THREE, writer=name(1), checkpoint=older, keep=Keep()) is THREE
    assert hopeless(THREE, older) is Hopeless.OVERTAKEN
    assert hopeless(THREE, checkpoint(at(4))) is None
    with pytest.raises(SupersededError):
        end(second, writer=name(1))


def test_a_base_must_be_named_by_a_checkpoint() -> None:
    base, later = Folder(name(1), at(1)), Folder(name(1), at(4))
    made = committed(THREE, 4)
    named = commit(THREE, writer=name(1), checkpoint=checkpoint(at(4), bases=[later]), keep=Keep())
    assert named.has(at(4))
    gone = checkpoint(at(5), bases=[base])
    assert commit(made, writer=name(1), checkpoint=gone, keep=Keep()) is made
    assert hopeless(made, gone) is Hopeless.BASE_GONE
    shared = commit(named, writer=name(1), checkpoint=checkpoint(at(5), bases=[later]), keep=Keep())
    assert shared.has(at(5))


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (Keep(last=2, whole=frozenset(map(at, (2, 3, 4)))), [3, 4]),
        (Keep(last=3, whole=frozenset(map(at, (1, 2, 3, 4)))), [2, 3, 4]),
        (Keep(last=2, whole=frozenset({at(4)})), [1, 2, 3, 4]),
        (Keep(last=2, whole=frozenset({at(1), at(4)})), [1, 2, 3, 4]),
        (Keep(last=1, whole=frozenset({at(4)})), [4]),
        (Keep(last=1, whole=frozenset({at(4)}), in_use=frozenset({at(2)})), [2, 4]),
        (Keep(last=1, whole=frozenset({at(4)}), every_steps=2), [2, 4]),
    ],
)
def test_retention_counts_what_is_whole(keep: Keep, left: list[int]) -> None:
    assert boundaries(commit(THREE, writer=name(1), checkpoint=checkpoint(at(4)), keep=keep)) == left


def test_retention_does_not_count_what_is_damaged() -> None:
    damaged = quarantine(THREE, checkpoint=THREE.checkpoints[2], why="two reads differ")
    keep = Keep(last=2, whole=frozenset(map(at, (2, 3, 4))))
    made = commit(damaged, writer=name(1), checkpoint=checkpoint(at(4)), keep=keep)
    assert boundaries(made) == [2, 3, 4]
    assert quarantine(THREE, checkpoint=checkpoint(at(3), writer=9), why="of another writer") is THREE


def test_retention_leaves_other_branches() -> None:
    second = begun(THREE, at(1))
    made = committed(second, 4, 5, last=2)
    assert [str(each.id) for each in made.checkpoints] == [
        str(at(2)),
        str(at(3)),
        str(at(4, 2)),
        str(at(5, 2)),
    ]


def test_adoption_takes_all_that_the_writer_can_still_commit() -> None:
    stray = [checkpoint(at(9), writer=2), checkpoint(at(2)), checkpoint(at(5)), checkpoint(at(4))]
    assert boundaries(adopt(THREE, tuple(stray))) == [1, 2, 3, 4, 5]
    assert adopt(THREE, tuple(stray[:2])) is THREE


def test_a_branch_goes_back() -> None:
    gone_back = branch(THREE, new=new_writer(THREE, "22222222", []), parent=at(1))
    assert gone_back.ended
    assert [each.id for each in visible(gone_back)] == [at(1)]
    assert boundaries(gone_back) == [1, 2, 3]
    with pytest.raises(NoSuchStepError):
        branch(THREE, new=new_writer(THREE, "22222222", []), parent=at(9))


def folders(*each: tuple[int, SnapshotId]) -> list[Folder]:
    return [Folder(name(writer), id) for writer, id in each]


def test_garbage_is_what_no_later_version_names() -> None:
    base = Folder(name(1), at(0))
    with_base = commit(
        THREE, writer=name(1), checkpoint=checkpoint(at(4), bases=[Folder(name(1), at(4))]), keep=Keep()
    )
    named = begun(with_base, at(4))
    of = folders((1, at(0)), (1, at(3)), (1, at(9)), (2, at(4)), (2, at(9, 2)), (3, at(1, 3)))
    kept = [Spared.NOTHING, Spared.ALL, Spared.NOTHING, Spared.ALL, Spared.ALL, Spared.ALL]
    assert list(spared(named, of).values()) == kept
    later = committed(named, 5)
    assert spared(later, folders((2, at(4, 2)), (2, at(6, 2)))) == {
        Folder(name(2), at(4, 2)): Spared.NOTHING,
        Folder(name(2), at(6, 2)): Spared.ALL,
    }
    assert spared(named, [base]) == {base: Spared.NOTHING}


def test_frozen_files_of_a_base_stay() -> None:
    base = Folder(name(1), at(1))
    first = commit(begun(MADE), writer=name(1), checkpoint=checkpoint(at(1), bases=[base]), keep=Keep(last=1))
    keep = Keep(last=1, whole=frozenset({at(2)}))
    made = commit(first, writer=name(1), checkpoint=checkpoint(at(2), bases=[base]), keep=keep)
    assert boundaries(made) == [2]
    assert spared(made, [base]) == {base: Spared.FROZEN}


def test_writers_that_a_restored_catalogue_does_not_know_are_spared() -> None:
    new = new_writer(THREE, "0badcafe", [name(1), name(2)])
    restored = begin(THREE, new=new, lineage=(at(3),))
    assert restored.foreign == {name(2)}
    of = folders((2, at(1, 2)), (1, at(0)))
    assert list(spared(restored, of).values()) == [Spared.ALL, Spared.FROZEN]


def test_the_store_leads_that_has_the_newest_checkpoint_of_the_other() -> None:
    behind = follow(EMPTY, new=new_writer(EMPTY, "33333333", []), lead=begun(MADE))
    ahead = begun(THREE, at(3))
    assert relate(ahead, behind) is ahead
    assert relate(behind, ahead) is ahead
    # Attempts that died before a checkpoint do not count.
    two = committed(begun(MADE), 1, 2)
    assert relate(begun(two, at(2)), THREE) is THREE
    # What a branch has left behind is known to the store that was branched.
    branched = begun(THREE, at(1))
    assert relate(branched, THREE) is branched
    assert relate(committed(branched, 5), THREE) == committed(branched, 5)
    one, other = committed(begun(THREE, at(2)), 5), committed(begun(THREE, at(1)), 6)
    with pytest.raises(UnusableRunError, match="diverged"):
        relate(one, begin_as(other, 5))
    with pytest.raises(UnusableRunError, match="different runs"):
        relate(THREE, begun(make(EMPTY, run_id="0" * 16)))


def begin_as(catalogue: Catalogue, number: int) -> Catalogue:
    """The same attempt under another name, with the same checkpoints."""
    new = new_writer(THREE, f"{number:08x}", [name(number - 1)])
    made = begin(THREE, new=new, lineage=(at(1),))
    return committed(
        made, *(each.id.boundary for each in catalogue.checkpoints if each.id.attempt == name(2))
    )


def test_a_mirror_that_follows_a_newer_attempt_is_not_taken_back() -> None:
    newer = begun(THREE, at(3))
    mirror = follow(EMPTY, new=new_writer(EMPTY, "33333333", []), lead=newer)
    assert (mirror.run_id, mirror.attempt) == (RUN, newer.attempt)
    assert parent_of(mirror) == at(3)
    with pytest.raises(SupersededError, match="behind"):
        follow(mirror, new=new_writer(mirror, "44444444", []), lead=THREE)


def test_a_rebuilt_catalogue_names_what_was_found() -> None:
    new = new_writer(EMPTY, "33333333", [name(1), name(2)])
    found = (*THREE.checkpoints, checkpoint(at(5, 2)))
    made = rebuild(EMPTY, new=new, run_id=RUN, found=found, lineages={name(1): (), name(2): (at(2),)})
    assert made.ended
    assert made.foreign == {name(1), name(2)}
    assert [each.id for each in visible(made)] == [at(1), at(2), at(5, 2)]
    assert made.attempt > name(2)


def test_an_empty_run_is_made_once() -> None:
    made = make(EMPTY, run_id=RUN)
    assert (made.version, made.attempt, make(made, run_id="0" * 16)) == (1, NO_ATTEMPT, made)
    assert Catalogue.from_bytes(made.to_bytes(), "file") == made
    assert begun(made).attempt == name(1)


def test_a_run_of_one_checkpoint_is_made_beside_nothing() -> None:
    made = found(EMPTY, run_id=RUN, checkpoint=checkpoint(at(0)))
    assert (newest(made), made.ended) == (checkpoint(at(0)), True)
    assert found(made, run_id=RUN, checkpoint=checkpoint(at(0))) is made
    assert parent_of(begun(made, at(0))) == at(0)
    with pytest.raises(UnusableRunError, match="meanwhile"):
        found(THREE, run_id=RUN, checkpoint=checkpoint(at(0)))


def test_a_checkpoint_that_is_whole_again_counts_again() -> None:
    one = THREE.checkpoints[0]
    damaged = quarantine(THREE, checkpoint=one, why="here: two reads differ")
    assert clear(damaged, checkpoint=one).damaged == ()
    assert clear(THREE, checkpoint=one) is THREE


def test_retention_by_itself() -> None:
    whole = frozenset(each.id for each in THREE.checkpoints)
    assert boundaries(retain(THREE, keep=Keep(last=2, whole=whole))) == [2, 3]
    assert retain(THREE, keep=Keep(last=3, whole=whole)) is THREE
    assert retain(THREE, keep=Keep(last=2, whole=whole - {at(3)})) is THREE


def test_a_lineage_does_not_grow_for_ever() -> None:
    catalogue = committed(begun(EMPTY), 1)
    for _ in range(LINEAGE_KEPT + 50):
        parent = SnapshotId(catalogue.attempt, 1)
        catalogue = begun(catalogue, parent if catalogue.attempt != NO_ATTEMPT else None)
    lineage = dict(catalogue.lineages)[catalogue.attempt]
    assert len(lineage) == LINEAGE_KEPT + 1
    assert lineage[-1] == at(1)
    assert len(catalogue.lineages) == 2
    assert len(catalogue.to_bytes()) < 80_000
