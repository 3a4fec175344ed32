"""The ranks of a job open their run: one attempt for all, in one folder that all nodes see or in several.

Owns how it is found out which nodes share a folder, and what is said of it. A claim is what tells: it is made
exclusively, so that of two nodes one alone can have made it where both see one folder.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from flashckpt._native import xxh3_64
from flashckpt.checkpointer.session import (
    KnownRun,
    Session,
    check_not_held,
    highest_in_memory,
    open_session,
)
from flashckpt.commit import attempts
from flashckpt.errors import NoSuchStepError, OptionError, RunError, UnusableRunError
from flashckpt.format.checked_json import compact
from flashckpt.format.names import AttemptName
from flashckpt.format.replicas import Ranks, has_rank, in_words, ranks_of, ranks_to_json
from flashckpt.memory.room import mounts
from flashckpt.memory.runtime import RuntimeFolder, base_folder, identity_of
from flashckpt.options import Keep, Options, Remote
from flashckpt.ranks.group import Group
from flashckpt.store import open_store

if TYPE_CHECKING:
    from flashckpt.tiers.nearest import RemoteRun

log = logging.getLogger(__name__)


def open_together(
    path: str | os.PathLike[str], keep: Keep, options: Options, group: Group, remote: Remote | None = None
) -> Session:
    """Take part in one attempt with all ranks. Rank 0 claims it; then one rank of each other node joins, and
    finds or starts its keeper; the others find theirs. Rank 0 says what the remote has; where the run has
    gone on there, each folder is told."""
    session: Session | None = None

    def opened(known: KnownRun, join: AttemptName | None, claims: bool) -> list[str]:
        nonlocal session
        session = open_session(
            path,
            keep,
            options,
            group.environment,
            join=join,
            group=group,
            known=known,
            claims=claims,
            remote=remote,
        )
        return [str(session.attempt), session.run_id]

    rank, first = group.environment.rank, group.node[0]
    try:
        found = group.agree(
            "which run it is",
            partial(_seen_by_node, path, options, group) if rank == first else _nothing,
            _one_run,
        )
        known, seen = KnownRun(*found) if found is not None else KnownRun(), None
        if remote is not None:
            known, seen = _with_remote(path, options, group, known, remote)
        name, run_id = group.led("the claim of the run", partial(opened, known, None, False))
        claimed, known = AttemptName.parse(name), KnownRun(run_id)
        for what, is_due in (
            ("a keeper for each node", rank == first),
            ("the keeper of this node", rank != first),
        ):
            joins = partial(opened, known, claimed, rank == first)
            group.together(what, joins if is_due and not group.leads else _nothing)
        assert session is not None
        session.ranks, session.remote_run = _folder_ranks(session, group), seen
        if seen is not None:
            _take_over(session, seen)
    except BaseException:
        if session is not None:
            session.close()
        raise
    return session


def _nothing() -> None:
    """What a rank does while others have something to do."""


def _seen(path: str | os.PathLike[str], options: Options) -> list[Any]:
    """The run's id in the folder that this node sees, empty where there is none, and the highest number of an
    attempt."""
    store = open_store(path, options.storage_options)
    try:
        return [attempts.open_run(store, create=False).run_id, attempts.highest_number(store)]
    except NoSuchStepError:
        return ["", 0]
    except OSError as error:
        raise RunError(
            f"The run's folder {os.fspath(path)} cannot be read: {error.strerror or error}. Nothing was "
            "written and training has not begun. Choose a folder that this user can use.",
            path=path,
        ) from error


def _seen_by_node(path: str | os.PathLike[str], options: Options, group: Group) -> list[Any]:
    """The same, by the first rank of a node: where rank 0 is elsewhere, also of this node's memory."""
    run_id, above = _seen(path, options)
    if group.leads or not run_id:
        return [run_id, above]
    store, base = open_store(path, options.storage_options), base_folder(group.environment.runtime_folder)
    with contextlib.suppress(FileNotFoundError):
        identity = identity_of(run_id, store.place())
        with contextlib.closing(RuntimeFolder.open(base, identity, create=False)) as runtime:
            above = max(above, highest_in_memory(store, runtime))
    return [run_id, above]


def _with_remote(
    path: str | os.PathLike[str], options: Options, group: Group, known: KnownRun, remote: Remote
) -> tuple[KnownRun, RemoteRun]:
    """What ranks know of the run with its remote, as rank 0 sees it: of its first start the id is made
    there."""
    from flashckpt.checkpointer.remote import look_at
    from flashckpt.tiers.nearest import RemoteRun

    def looked() -> list[Any]:
        mine = known if known.run_id else KnownRun(*_seen(path, options))
        store = open_store(path, options.storage_options)
        try:
            run_id, found = look_at(remote, store, mine.run_id)
        except UnusableRunError:
            # Whoever trains here has made them differ, perhaps: nothing is to be moved from under him.
            check_not_held(store, mine.run_id, group.environment)
            raise
        return [run_id, max(mine.above, found.above), found.told()]

    run_id, above, told = group.led("what the run's remote has", looked)
    found = RemoteRun.heard(open_store(remote.url, remote.options), told)
    return KnownRun(run_id, max(known.above, above)), found


def _take_over(session: Session, remote: RemoteRun) -> None:
    """Where the run has gone on in the remote, each folder is told by the rank that leads it."""
    from flashckpt.tiers.nearest import take_over

    told = partial(take_over, session.store, remote, session.attempt)
    session.group.together("what the run's remote has", told if session.leads else _nothing)


def _one_run(rows: list[Any]) -> list[Any]:
    """UnusableRunError where nodes have folders of different runs."""
    seen = {rank: row for rank, row in enumerate(rows) if row is not None}
    ids = sorted({run_id for run_id, _ in seen.values() if run_id})
    if len(ids) > 1:
        of = {run_id: [rank for rank, row in seen.items() if row[0] == run_id] for run_id in ids}
        named = "; ".join(f"run {run_id} on the node of rank {ranks[0]}" for run_id, ranks in of.items())
        raise UnusableRunError(
            f"The nodes' folders are of different runs ({named}). Nothing was loaded or changed. Give every "
            "node the folder that it had in this run, an empty one where that is lost, or name another path."
        )
    return [ids[0] if ids else "", max(number for _, number in seen.values())]


def _folder_ranks(session: Session, group: Group) -> Ranks | None:
    """The ranks that share this one's folder; None where all do. Said in the log where not all do."""

    def mark() -> list[Any]:
        holder = attempts.read_claim(session.store, session.attempt).holder
        who = [holder.boot_id, holder.runtime_id, holder.runtime, holder.lock]
        return [group.node[0], f"{xxh3_64(compact(who)):016x}", file_system_of(session.store.url)]

    found = group.agree("which nodes share the run's folder", mark, _shared)
    if found is None:
        return None
    folders = [tuple(range(*run) for run in runs) for runs, _ in found]
    ranks = next(each for each in folders if has_rank(each, group.environment.rank))
    if session.leads:
        log.warning(
            "%s is not one folder on all nodes: %s of %d share this one (there are %d). Each commits its own "
            "ranks; a resume takes the newest step that all have, on the same nodes, and a step counts where "
            "all nodes have it",
            session.store.url, in_words(ranks), group.environment.world, len(folders),
        )  # fmt: skip
    if group.leads and (
        unlike := unlike_kinds({of: kind for of, (_, kind) in zip(folders, found, strict=True)})
    ):
        log.warning("%s %s", session.store.url, unlike)
    return ranks


def unlike_kinds(kinds: Mapping[Ranks, str]) -> str:
    """What is said where folders are on file systems of different kinds; empty where they are not."""
    if len(set(kinds.values())) < 2:
        return ""
    each = "; ".join(f"{kind or 'unknown'} for {in_words(ranks)}" for ranks, kind in kinds.items())
    return (
        f"is on file systems of different kinds ({each}): one that nodes share may not be mounted on all of "
        "them. If it is meant to be, stop, mount it and start again in an empty folder: what each node "
        "commits now the others do not see"
    )


def file_system_of(folder: str) -> str:
    """The kind of the file system that has a folder, "root " before that of "/"; empty if nothing tells."""
    path = os.path.realpath(folder)
    if not os.path.isdir(path):
        return ""
    above = [each for each in mounts() if os.path.commonpath([each.point, path]) == each.point]
    found = max(above, key=lambda each: len(each.point), default=None)
    return "" if found is None else f"{'root ' * (found.point == '/')}{found.kind}"


def _shared(rows: list[Any]) -> list[Any] | None:
    """The ranks of each folder and the kind of its file system; None where there is one. OptionError where
    ranks of one node have several: their keeper is one, and has one."""
    folders: dict[str, list[int]] = {}
    of_node: dict[int, str] = {}
    kinds: dict[str, str] = {}
    for rank, (first, mark, kind) in enumerate(rows):
        folders.setdefault(mark, []).append(rank)
        kinds[mark] = kind
        if of_node.setdefault(first, mark) != mark:
            raise OptionError(
                f"Ranks {first} and {rank} are on one node, and the run's path is not the same folder for "
                "them. Nothing was loaded or changed. Give the ranks of a node one folder."
            )
    if len(folders) == 1:
        return None
    return [[ranks_to_json(ranks_of(ranks)), kinds[mark]] for mark, ranks in folders.items()]
