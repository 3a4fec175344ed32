"""Where the processes of the search begin, and which there are."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from flashckpt.catalogue.changes import quarantine
from flashckpt.format.catalogue import EMPTY, Catalogue, Folder, version_path
from flashckpt.format.manifest import File, FrozenFile, Manifest, PartFile, PartHead, RankFiles, part_name
from flashckpt.format.names import AttemptName, SnapshotId
from tests.catalogue import processes
from tests.catalogue.explorer import Process, Search
from tests.catalogue.invariants import Invariants
from tests.catalogue.model import FLAKY, NFS, PAGED, PLAIN, POSIX, S3, SHORT, Store, World, run_alone
from tests.catalogue.processes import (
    HOME,
    MIRROR,
    ROTTEN,
    Leader,
    attempt,
    copy_newest,
    go_back,
    nonce,
    prune,
    read_all,
    recover,
    resume_half_written,
    run_id,
    save_parent,
    verify,
    write,
)

MOST_STATES = 2_500_000


@dataclass(frozen=True)
class Scenario:
    """See `Process.is_coarse` for `is_coarse`.

    memory: offers of nodes. foreign: writers of a lost catalogue. resumes: a snapshot in the history of every
    attempt that begins. is_lost: no job can start before `flashckpt recover` has run.
    """

    name: str
    files: World
    processes: tuple[Process, ...]
    keep: int = 1
    memory: frozenset[SnapshotId] = frozenset()
    foreign: frozenset[AttemptName] = frozenset()
    resumes: SnapshotId | None = None
    is_lost: bool = False
    kills: int = 1
    stores: tuple[Store, ...] = (POSIX, S3, NFS)
    is_coarse: bool = False

    def search(self, store: Store, most_states: int = MOST_STATES, by_answers: bool = False) -> Search:
        invariants = Invariants(self.files, self.keep, self.memory, self.foreign, self.resumes, self.is_lost)
        return Search(
            store,
            self.files,
            tuple(replace(each, is_coarse=self.is_coarse) for each in self.processes),
            invariants,
            self.kills,
            most_states,
            by_answers,
        )


def job(name: str, *boundaries: int, **options: Any) -> Process:
    memory = options.pop("memory", frozenset())
    act = partial(Leader(name, **options).train, boundaries, memory)
    return Process(f"job {name}", act, nonce=nonce(name))


def leader(
    name: str,
    catalogue: Catalogue,
    *boundaries: int,
    frozen: tuple[str | FrozenFile, ...] = (),
    **options: Any,
) -> Process:
    """A leader of the writer of `catalogue`, which is the version that it knows."""
    act = partial(Leader(name, **options).lead, catalogue, catalogue.writer, boundaries, frozen)
    return Process(f"leader {name}", act, nonce=catalogue.writer.nonce)


# What a mutation can replace is looked up when the process begins.


def copier(name: str, keep: int) -> Process:
    return Process(f"copy {name}", lambda: processes.copy_newest(name, keep), nonce=nonce(name))


def keeper(name: str, node: int) -> Process:
    """Of one of two nodes of attempt a."""
    return Process(f"keeper {name}", lambda: processes.write(A, A_2, name, node, 2))


A, B = attempt(1, "a"), attempt(2, "b")
A_1, A_2, A_3, A_4 = (SnapshotId(A, boundary) for boundary in (1, 2, 3, 4))
A_60, B_2, C_1 = SnapshotId(A, 60), SnapshotId(B, 2), SnapshotId(attempt(3, "c"), 1)
FROZEN = FrozenFile(Folder(A, A_1), f"frozen-0-{nonce('a1')}", 1)
"""The frozen file that attempt a has written with its first snapshot."""
UNNAMED = FROZEN._replace(name="frozen-0-0000beef")
"""Of a keeper that was replaced: no manifest names it."""
NEVER = FrozenFile(Folder(A, A_2), f"frozen-0-{nonce('n0')}", 1)
"""Of a snapshot that was never whole."""


class Begun:
    """Where scenarios begin. Attempt a has committed its boundary 1, in most of them."""

    def __init__(self) -> None:
        self.fresh = run_alone({}, Leader("a").train())[0]
        self.one, self.at_one = run_alone({}, Leader("a").train((1,)))
        self.three, self.at_three = run_alone({}, Leader("a", keep=3).train((1, 2, 3)))
        self.begun, self.at_begun = run_alone(self.one, Leader("b").train())
        self.half = self._written(self.one, A_2, 0)
        self.whole = self._written(self.half, A_2, 1)
        shared, at_shared = run_alone({}, processes.start("a"))
        self.shared, self.at_shared = run_alone(shared, Leader("a").lead(at_shared, A, (1,), ("new",)))
        self.twice = {**self.shared, f"home/{UNNAMED.base.path}/{UNNAMED.name}": "bytes"}
        self.never_whole = run_alone(self.one, write(A, A_2, "n0", 0, 2, "new"))[0]
        self._after_loss()
        self._mirrors()
        rotten = f"home/{Folder(A, A_3).path}/{part_name(0, nonce('a3'))}"
        self.rotten = rotten.removeprefix("home/")
        self.damaged = {path: ROTTEN if path == rotten else each for path, each in self.three.items()}
        self.lacking = {path: each for path, each in self.three.items() if path != rotten}

    def _written(self, files: World, id: SnapshotId, node: int) -> World:
        return run_alone(files, write(id.attempt, id, f"n{node}", node, 2))[0]

    def _after_loss(self) -> None:
        """Versions that are lost, cut, or restored from a backup, beside newer data."""
        later = run_alone(self.three, Leader("b", keep=5).train((1, 2)))[0]
        for node in (0, 1):
            later = self._written(later, A_4, node)
        self.lost = {path: each for path, each in later.items() if "/catalogue/" not in path}
        old = f"home/{version_path(3, run_id('a'))}"
        cut = f"home/{Folder(A, A_4).path}/rank-1-{nonce('n1')}"
        backup = {**self.lost, old: self.one[old], cut: SHORT}
        self.backup = backup
        # Whole, and garbage for the backup.
        dropped, part = Folder(A, SnapshotId(A, 0)), part_name(0, nonce("a0"))
        files = RankFiles(0, File(part, 1))
        head = PartHead(id=dropped.id, step=0, world=1, node=0, ranks=(files,))
        behind = {**backup, f"home/{dropped.path}/{part}": head}
        manifest = Manifest(folder=dropped, step=0, world=1, parts=(PartFile(part, 1, (0,)),), shards=())
        self.behind = run_alone(behind, HOME.publish(replace(EMPTY, run_id=run_id("a")), manifest))[0]
        versions = sorted(path for path in later if "/catalogue/" in path)
        self.unreadable = {**self.lost, **dict.fromkeys(versions[-2:], SHORT)}
        self.newest_unreadable = {**self.lost, versions[-2]: later[versions[-2]], versions[-1]: SHORT}

    def _mirrors(self) -> None:
        missed = run_alone(self.one, copy_newest("m"))[0]
        missed = run_alone(missed, Leader("b").train((), frozenset({A_60})))[0]
        missed = run_alone(missed, copy_newest("m"))[0]
        self.missed = run_alone(missed, save_parent("c", A_60))[0]
        newer = run_alone(self.one, Leader("a").lead(self.at_one, A, (2, 9)))[0]
        newer = run_alone(newer, Leader("b").train((1, 2)))[0]
        newer = run_alone(newer, Leader("c").train((1,)))[0]
        newer = run_alone(newer, copy_newest("m"))[0]
        self.mirrored = {path: each for path, each in newer.items() if path.startswith("mirror/")}
        self.mirrored_frozen = run_alone(self.shared, copy_newest("m", 2))[0]


AT = Begun()
DEEP = (POSIX, S3, PAGED, NFS)
A_SAVES = leader("a", AT.at_one, 2)
POLLING_A = leader("a", AT.at_one, 2, polls=1)
READER = Process("reader", read_all, may_die=False)
COLLECTOR, COLLECTOR_2 = Process("collector", prune), Process("collector 2", prune)
BRANCHER = Process("branch", partial(go_back, "x", A_1), nonce=nonce("x"))
RECOVER_X, RECOVER_Y = (Process(f"recover {n}", partial(recover, n, B_2), nonce=nonce(n)) for n in "xy")
COPY_X, COPY_Y, COPY_2X, COPY_2Y = (copier(name, keep) for keep in (1, 2) for name in "xy")
MARK = partial(quarantine, checkpoint=AT.at_begun.checkpoints[0], why="two reads differ")
MARKER = Process("mark", lambda: HOME.update(MARK))
KEEPERS = [keeper(f"n{node}", node) for node in (0, 1)]
AGAIN = keeper("m0", 0)
HALF_B = partial(resume_half_written, "b", frozenset({A_3}), False)
HALF_C = partial(resume_half_written, "c", frozenset({A_2}), True)
PRUNER = Process("prune", partial(prune, 1), may_remove=True)
VERIFIER = Process("verify", partial(verify, AT.at_three.checkpoints[-1], AT.rotten))
LOST: dict[str, Any] = {"resumes": B_2, "is_lost": True, "is_coarse": True}
MIRROR_READER = Process("reader", partial(read_all, MIRROR))

_ALL = [
    # of leaders
    Scenario("first start", {}, (job("a", 1, ends=True), job("b", 1)), kills=2, stores=DEEP),
    Scenario("deposed leader", AT.one, (A_SAVES, job("b", 1, 2)), kills=2, stores=DEEP),
    Scenario("sleeping leader", AT.one, (A_SAVES, job("b", 1, 2, trims=True)), kills=2),
    Scenario(
        "sleeping leader and reader",
        AT.one,
        (leader("a", AT.at_one, 2, collects=False), job("b", 1, 2, collects=False, trims=True), READER),
        stores=(POSIX, NFS),
        is_coarse=True,
    ),
    Scenario(
        "sleeping start and collector",
        AT.begun,
        (
            leader("b", AT.at_begun, 1, 2, 3, collects=False, trims=True),
            job("c", collects=False),
            COLLECTOR,
        ),
        kills=0,
        stores=(POSIX,),
        is_coarse=True,
    ),
    Scenario("start adopts", AT.whole, (POLLING_A, job("b", 1)), kills=2),
    Scenario("late manifest", AT.one, (A_SAVES, job("b"), job("c")), stores=(POSIX,), is_coarse=True),
    Scenario("two starts adopt", AT.whole, (POLLING_A, job("b"), job("c")), stores=(POSIX,), is_coarse=True),
    Scenario(
        "two sleepers",
        AT.begun,
        (
            leader("b", AT.at_begun, 1, 2, 3, 4, collects=False, trims=True),
            leader("1", AT.at_begun, 9, keep=2),
            MARKER,
        ),
        kills=0,
        stores=(PLAIN,),
    ),
    Scenario(
        "two leaders of one attempt",
        AT.one,
        (leader("1", AT.at_one, 2, 3, keep=2), leader("2", AT.at_one, 3, keep=2), READER),
        keep=2,
        kills=2,
        is_coarse=True,
    ),
    Scenario("flaky store", AT.one, (A_SAVES, job("b", 1, trims=True)), kills=2, stores=(FLAKY,)),
    # of keepers
    Scenario("keepers", AT.one, (*KEEPERS, leader("a", AT.at_one, 2, polls=2), job("b")), kills=2),
    Scenario("keeper replaced", AT.whole, (AGAIN, POLLING_A, job("b")), kills=2),
    # of parents
    Scenario(
        "parent in memory",
        AT.half,
        (job("b", 1, memory=frozenset({A_3})), job("c", 1, memory=frozenset({A_2}))),
        memory=frozenset({A_2, A_3}),
        kills=2,
    ),
    Scenario(
        "parent in memory, no checkpoint",
        AT.fresh,
        (job("b", 1, memory=frozenset({A_60})), job("c", 1, memory=frozenset({A_60}))),
        memory=frozenset({A_60}),
        stores=(POSIX, S3),
        is_coarse=True,
    ),
    Scenario(
        "parent half written",
        AT.half,
        (
            Process("job b", HALF_B, nonce=nonce("b")),
            Process("job c", HALF_C, nonce=nonce("c")),
            COLLECTOR,
        ),
        memory=frozenset({A_2, A_3}),
        is_coarse=True,
    ),
    # of commands
    Scenario(
        "prune", AT.three, (leader("a", AT.at_three, 4, keep=3), PRUNER, READER), keep=3, is_coarse=True
    ),
    Scenario(
        "branch",
        AT.three,
        (leader("a", AT.at_three, 4, keep=2, ends=True), BRANCHER, READER),
        keep=2,
        kills=2,
        is_coarse=True,
    ),
    Scenario("file lost", AT.lacking, (leader("a", AT.at_three, 4, keep=2), job("b", keep=2)), keep=2),
    Scenario(
        "damaged",
        AT.damaged,
        (leader("a", AT.at_three, 4, keep=2), VERIFIER, job("b", keep=2)),
        keep=2,
        stores=(POSIX, NFS),
        is_coarse=True,
    ),
    # of frozen files
    Scenario(
        "frozen file shared",
        AT.shared,
        (leader("a", AT.at_shared, 2, 3, frozen=(FROZEN, FROZEN)), job("b", 1), COLLECTOR),
        stores=(POSIX,),
        is_coarse=True,
    ),
    Scenario(
        "frozen file dropped",
        AT.shared,
        (leader("a", AT.at_shared, 2, 3, frozen=("", FROZEN)), COLLECTOR, COLLECTOR_2),
    ),
    Scenario(
        "frozen file twice",
        AT.twice,
        (leader("a", AT.at_shared, 2, 3, frozen=(UNNAMED, UNNAMED)), COLLECTOR),
    ),
    Scenario(
        "base never whole",
        AT.never_whole,
        (leader("a", AT.at_one, 3, 4, 5, frozen=("", NEVER, NEVER)), job("b"), COLLECTOR),
        stores=(POSIX,),
        is_coarse=True,
    ),
    # after losses
    Scenario("backup", AT.backup, (job("c", 1, keep=3), COLLECTOR), keep=3, kills=2, foreign=frozenset({B})),
    Scenario("backup and branch", AT.backup, (BRANCHER, COLLECTOR), keep=3, kills=2, foreign=frozenset({B})),
    Scenario(
        "backup and recover",
        AT.behind,
        (RECOVER_X, job("c", collects=False), COLLECTOR),
        keep=3,
        foreign=frozenset({B}),
        stores=(POSIX, NFS),
        is_coarse=True,
    ),
    Scenario("no version", AT.lost, (RECOVER_X, RECOVER_Y, job("c")), foreign=frozenset({A, B}), **LOST),
    Scenario(
        "no readable version",
        AT.unreadable,
        (RECOVER_X, job("c", 1, keep=3), COLLECTOR),
        keep=3,
        foreign=frozenset({A, B}),
        **LOST,
    ),
    Scenario("newest version unreadable", AT.newest_unreadable, (RECOVER_X, job("c", 1), COLLECTOR), **LOST),
    # of mirrors
    Scenario("mirror", AT.one, (A_SAVES, COPY_X, COPY_Y), kills=0, stores=(POSIX,), is_coarse=True),
    Scenario(
        "mirror begins late",
        AT.begun,
        (leader("b", AT.at_begun, 1), COPY_X),
        stores=(POSIX, S3),
        is_coarse=True,
    ),
    Scenario("mirror and reader", AT.one, (COPY_X, COPY_Y, MIRROR_READER), stores=(POSIX, NFS)),
    Scenario("mirror that missed a start", AT.missed, (job("d", 1, mirror=MIRROR), COPY_X), resumes=A_60),
    Scenario(
        "old home, newer mirror",
        {**AT.one, **AT.mirrored},
        (job("d", 1, mirror=MIRROR), COPY_X),
        resumes=C_1,
    ),
    Scenario(
        "empty home, full mirror",
        AT.mirrored,
        (job("d", 1, mirror=MIRROR), job("e", mirror=MIRROR)),
        resumes=C_1,
        is_coarse=True,
    ),
    Scenario(
        "mirror, frozen file",
        AT.mirrored_frozen,
        (leader("a", AT.at_shared, 2, frozen=(FROZEN,)), COPY_2X, COPY_2Y),
        kills=0,
        stores=(POSIX,),
        is_coarse=True,
    ),
]
SCENARIOS = {each.name: each for each in _ALL}
