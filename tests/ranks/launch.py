"""Ranks on this machine, by `torch.distributed.run` or forked: started, waited for, killed, cleared away.

A node is a launcher of its own with a runtime folder of its own, which stays from one launch to the next, as
a node's memory does. Everything that a launcher has started is found by a word in its environment: nothing of
it outlives `close`, keepers included, however a test ends.
"""

import contextlib
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch.distributed import TCPStore

from tests import zygote
from tests.processes import end, keepers_of
from tests.ranks.rank import FOLDER, LAUNCH
from tests.waiting import until

HOST, LIMIT_S = "127.0.0.1", 240.0
_OWNER = "FLASHCKPT_TEST_OWNER"
# What this process may have been given by a launcher of its own.
_NOT_PASSED_ON = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "SLURM")


@dataclass(frozen=True)
class Ended:
    """How one rank ended: its status, None where it was killed; the lines that it printed; its log."""

    rank: int
    status: int | None
    out: list[str]
    err: str


@dataclass(eq=False)
class Launch:
    """One job: `ranks` processes on each of its nodes, and their launchers, unless they were forked."""

    name: str
    folder: Path
    world: int
    launchers: dict[int, zygote.Forked] = field(default_factory=dict)
    forked: dict[int, zygote.Forked] = field(default_factory=dict)
    store: TCPStore | None = None
    command: Sequence[str] = ()

    def pid_of(self, rank: int) -> int:
        """The process of a forked rank."""
        return self.forked[rank].pid

    def kill(self) -> None:
        """SIGKILL for launchers and ranks, not for keepers: as a node that is let go at once."""
        for node in self.launchers:
            self.kill_launcher(node)
        if self.forked:
            end([each.pid for each in self.forked.values() if each.poll() is None])
            for each in self.forked.values():
                each.wait(LIMIT_S)
        end(_trainers(f"{LAUNCH}={self.name}"))

    def close(self) -> None:
        """What is left of it goes, and the store that is served here: a dozen descriptors."""
        self.kill()
        self.store = None

    def kill_launcher(self, node: int) -> None:
        """SIGKILL for a node's launcher, and its ranks die with it."""
        launcher, wanted = self.launchers[node], f"{LAUNCH}={self.name}"
        ranks = [pid for pid in _trainers(wanted) if _parent(pid) == launcher.pid]
        launcher.kill()
        launcher.wait(LIMIT_S)
        end(ranks)

    def said(self, rank: int, restart: int = 0) -> list[str]:
        """The whole lines that a rank has printed so far, in one incarnation of the group."""
        text = self._text(rank, restart, "out")
        return text[: text.rfind("\n") + 1].splitlines()

    def until_said(self, line: str, *ranks: int, restart: int = 0) -> None:
        """Wait until these ranks (all) have printed a line; fails where one can no more."""
        for rank in ranks or range(self.world):
            said = partial(self.said, rank, restart)
            self._until(lambda said=said: line in said() or not self.is_running(), f"{line!r} of rank {rank}")
            assert line in said(), self.told()

    def until_died(self, rank: int) -> None:
        """Wait until a forked rank was killed, by itself or by another."""
        process = self.forked[rank]
        self._until(lambda: process.poll() is not None, f"the death of rank {rank}")
        assert process.poll() == -signal.SIGKILL, self.told()

    def is_running(self) -> bool:
        processes = [*self.launchers.values(), *self.forked.values()]
        return any(each.poll() is None for each in processes)

    def until_over(self, limit_s: float = LIMIT_S) -> None:
        """Wait for the job's end, however it ends."""
        self._until(lambda: not self.is_running(), "the job's end", limit_s)

    def ended(self, restart: int = 0, limit_s: float = LIMIT_S) -> list[Ended]:
        """Wait for the job's end. How each rank's incarnation of this number ended, in their order."""
        self.until_over(limit_s)
        return [self._ended(rank, restart) for rank in range(self.world)]

    def finished(self, restart: int = 0, limit_s: float = LIMIT_S) -> list[Ended]:
        """The same of a job that is to succeed."""
        ended = self.ended(restart, limit_s)
        assert all(each.status == 0 for each in ended), self.told()
        return ended

    def told(self) -> str:
        """All that launchers and ranks have said, for a test that fails."""
        files = sorted(self.folder.glob(f"{self.name}-*"))
        return "\n".join(f"==== {each.name}\n{each.read_text(errors='replace')[-6000:]}" for each in files)

    def _until(self, condition: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None:
        try:
            until(condition, what, limit_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.told()}") from None

    def _ended(self, rank: int, restart: int) -> Ended:
        status = self._text(rank, restart, "status")
        out, err = self._text(rank, restart, "out"), self._text(rank, restart, "err")
        return Ended(rank, int(status) if status else None, out.splitlines(), err)

    def _text(self, rank: int, restart: int, suffix: str) -> str:
        path = self.folder / f"{self.name}-rank-{rank}-restart-{restart}.{suffix}"
        return path.read_text(errors="replace") if path.exists() else ""


class Launcher:
    """Starts jobs, one after the other, on nodes whose memory stays. `folder` is for their output."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._word = secrets.token_hex(8)
        self._runtimes: dict[int, Path] = {}
        self._launches: list[Launch] = []

    def runtime(self, node: int = 0) -> Path:
        """The runtime folder of a node."""
        if node not in self._runtimes:
            made = tempfile.mkdtemp(prefix=f"flashckpt-test-node{node}-", dir="/dev/shm")
            self._runtimes[node] = Path(made)
        return self._runtimes[node]

    def torchrun(
        self,
        program: str,
        *arguments: object,
        ranks: int = 2,
        nodes: int | Sequence[int] = 1,
        least_nodes: int | None = None,
        max_restarts: int = 0,
    ) -> Launch:
        """`python -m torch.distributed.run`: one launcher a node. nodes: how many, or which ones of before.
        least_nodes: with how few of them the job goes on."""
        which = range(nodes) if isinstance(nodes, int) else nodes
        launch = self._launch(ranks * len(which))
        if len(which) == 1:
            meeting = ["--standalone"]
        else:
            # Served here: no launcher's death takes it along, and no port is guessed.
            launch.store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
            meeting = [
                f"--nnodes={least_nodes or len(which)}:{len(which)}",
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint={HOST}:{launch.store.port}",
                f"--rdzv-id={launch.name}",
                # A launcher that says nothing for ten seconds is gone; one more is waited for three. Where
                # torchrun may begin with fewer nodes it waits longer: a busy machine starts them late.
                f"--rdzv-conf=is_host=false,join_timeout=200,last_call_timeout={20 if least_nodes else 3},"
                "keep_alive_interval=1,keep_alive_max_attempt=10",
                f"--local-addr={HOST}",
            ]
        launch.command = [
            *meeting, f"--nproc-per-node={ranks}", f"--max-restarts={max_restarts}",
            "--monitor-interval=0.1", "-m", "tests.ranks.rank", program, *map(str, arguments),
        ]  # fmt: skip
        for node in which:
            self.start_launcher(launch, node)
        return launch

    def start_launcher(self, launch: Launch, node: int) -> None:
        """The launcher of one node of a job; one that was killed comes again so."""
        with open(self._folder / f"{launch.name}-node-{node}.log", "ab") as log:
            launch.launchers[node] = zygote.shared().start(
                ["tests.ranks.launcher", *launch.command],
                stdin=zygote.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(launch, node, None),
                start_new_session=True,
            )

    def fork(
        self,
        program: str,
        *arguments: object,
        ranks: int = 2,
        nodes: int | Sequence[int] = 1,
        restart: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> Launch:
        """The same without a launcher: ranks are forked from a process that has imported torch, which saves
        three seconds of a core for each. Nobody restarts them and nobody ends the others of one that died;
        `restart` is what a launcher would say."""
        which = range(nodes) if isinstance(nodes, int) else nodes
        launch = self._launch(ranks * len(which))
        launch.store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        for rank in range(launch.world):
            node = which[rank // ranks]
            own = self._environment(launch, node, environment) | {
                "RANK": str(rank),
                "WORLD_SIZE": str(launch.world),
                "LOCAL_RANK": str(rank % ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "GROUP_RANK": str(rank // ranks),
                "MASTER_ADDR": HOST,
                "MASTER_PORT": str(launch.store.port),
                "TORCHELASTIC_USE_AGENT_STORE": str(True),
                "TORCHELASTIC_RESTART_COUNT": str(restart),
                "TORCHELASTIC_RUN_ID": self._word,
                # By Slurm's word a job is the restart of the one before.
                "SLURM_JOB_ID": self._word,
                "SLURM_RESTART_COUNT": str(restart),
            }
            launch.forked[rank] = zygote.shared().start(
                ["tests.ranks.rank", program, *map(str, arguments)],
                stdin=zygote.DEVNULL,
                env=own,
                start_new_session=True,
            )
        return launch

    def freeze_keepers(self, *nodes: int) -> None:
        """Stop these nodes' keepers, to be killed: what their trainers' deaths would have them save is
        lost."""
        for node in nodes:
            for pid in keepers_of(self.runtime(node)):
                os.kill(pid, signal.SIGSTOP)

    def thaw_keepers(self, *nodes: int) -> None:
        """Let those that were stopped go on."""
        for node in nodes:
            for pid in keepers_of(self.runtime(node)):
                os.kill(pid, signal.SIGCONT)

    def until_arrived(self, launch: Launch, rank: int, node: int) -> None:
        """Wait until a forked rank has come to this node's runtime folder, whether or not a keeper
        answers."""
        mark = f"-{launch.pid_of(rank)}-"
        until(
            lambda: any(mark in each.name for each in self.runtime(node).rglob("trainer-*")),
            "a rank",
            LIMIT_S,
        )

    def kill_keepers(self, node: int = 0, *, remove_regions: bool = False) -> None:
        """Kill a node's keepers; with remove_regions, what it has in memory goes too."""
        runtime = self.runtime(node)
        end(keepers_of(runtime))
        if remove_regions:
            for entry in runtime.iterdir():
                shutil.rmtree(entry)

    def close(self) -> None:
        with contextlib.ExitStack() as ends:
            for runtime in self._runtimes.values():
                ends.callback(shutil.rmtree, runtime, ignore_errors=True)
            ends.callback(_end_all, f"{_OWNER}={self._word}")
            for launch in self._launches:
                ends.callback(launch.close)

    def _launch(self, world: int) -> Launch:
        launch = Launch(f"{len(self._launches):02d}-{secrets.token_hex(4)}", self._folder, world)
        self._launches.append(launch)
        return launch

    def _environment(self, launch: Launch, node: int, more: Mapping[str, str] | None) -> dict[str, str]:
        passed = {key: value for key, value in os.environ.items() if not key.startswith(_NOT_PASSED_ON)}
        return passed | {
            _OWNER: self._word,
            LAUNCH: launch.name,
            FOLDER: str(self._folder),
            "FLASHCKPT_RUNTIME": str(self.runtime(node)),
            "GLOO_SOCKET_IFNAME": "lo",
            **(more or {}),
        }


def _processes(word: str) -> list[int]:
    """The processes whose environment, as they were started, has this word."""
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
            if word.encode() in file.read().split(b"\0"):
                found.append(pid)
    return found


def _trainers(word: str) -> list[int]:
    return [pid for pid in _processes(word) if not _is_keeper(pid)]


def _is_keeper(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"keeper/__main__.py" in file.read()
    except OSError:
        return False


def _end_all(word: str) -> None:
    while left := _processes(word):
        end(left)


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return -1
