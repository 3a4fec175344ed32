"""The order of a run: environment, limits, each peer in a session of its own, figures, report.

Nothing is measured in this process. What cannot run here is reported with its reason, not left out.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks import environment, figures, files, machine, peers, report, stopping
from benchmarks import settings as defaults
from benchmarks.ranks import KINDS, table
from benchmarks.ranks import peers as job_peers
from benchmarks.ranks.jobs import Jobs
from benchmarks.session import ProcessFailed, Session
from benchmarks.settings import GIB, Job, Settings

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console(width=None if sys.stdout.isatty() else 160)

_ROOT = Path(__file__).resolve().parent.parent
# Steps between checkpoints last so many times longer than the disk needs for the state at its best: a peer
# at half the disk's rate still has its whole interval.
_INTERVAL = 4.0
_LIMIT_REPETITIONS = 2
# With ranks: how often each peer's turn comes, in processes of its own, and what is measured in each.
_TURNS, _PAIRS, _ALONE, _JOB_BYTES = 3, 2, 2, GIB // 2


@app.command()
def bench(
    only: Annotated[str, typer.Option("--peers", help="comma-separated, or none; default: all")] = "",
    gib: Annotated[float, typer.Option(help="GiB of state; default: 1 on a CPU, 8 on a GPU")] = 0.0,
    device: Annotated[str, typer.Option(help="cpu or cuda; default: what is there")] = "",
    every: Annotated[int, typer.Option(help="steps between checkpoints; default: from the disk's rate")] = 0,
    rounds: Annotated[int, typer.Option(help="pairs of blocks of steps without and with checkpoints")] = 0,
    folder: Annotated[Path | None, typer.Option(help="where checkpoints go: the disk to measure")] = None,
    output: Annotated[Path, typer.Option(help="where the report goes")] = Path("bench-output"),
    quick: Annotated[bool, typer.Option(help="64 MiB and few steps: does everything still run?")] = False,
    here: Annotated[bool, typer.Option(help="run the peers in this environment; install nothing")] = False,
    figures_too: Annotated[bool, typer.Option("--figures/--no-figures", help="the figures to reach")] = True,
    timeout: Annotated[float, typer.Option(help="seconds for one process")] = 900.0,
    ranks: Annotated[str, typer.Option(help="jobs of so many ranks, as in 2,4, not one process")] = "",
    kinds: Annotated[str, typer.Option(help="of such jobs: how the model is divided")] = ",".join(KINDS),
) -> None:
    """Measure flashckpt against its peers on this machine."""
    known = job_peers.PEERS if ranks else peers.PEERS
    names = _chosen("peer", only or ",".join(known), known)
    stopping.install()
    output.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="work-", dir=folder or output)).resolve()
    settings = _settings(work, device=device, gib=gib, every=every, rounds=rounds, quick_run=quick)
    python, failures = (sys.executable, {}) if here else _environment()
    if ranks:
        worlds = [int(world) for world in ranks.split(",")]
        jobs = Jobs(_of_jobs(settings, gib), work, python, failures, timeout, output, console)
        turns = rounds or (1 if quick else _TURNS)
        _measure_jobs(jobs, names, worlds, _chosen("kind", kinds, KINDS), turns)
        return
    run = Run(settings, work, python, failures, timeout, output)
    try:
        run.all(names, figures.PARTS if figures_too else ())
    finally:
        with stopping.held():
            files.remove(work)
            run.show()


def _of_jobs(settings: Settings, gib: float) -> Settings:
    if settings.quick:
        return settings
    size = settings.state_bytes if gib else _JOB_BYTES
    return replace(settings, state_bytes=size, rounds=_PAIRS, repetitions=_ALONE)


def _measure_jobs(jobs: Jobs, names: list[str], worlds: list[int], kinds: list[str], turns: int) -> None:
    try:
        found = jobs.all(names, worlds, kinds, turns)
    finally:
        with stopping.held():
            files.remove(jobs.work)
    written = table.write(found, jobs.output)
    table.show(found, console)
    console.print(f"written: [bold]{written}[/]")


def _chosen(what: str, asked: str, known: Collection[str]) -> list[str]:
    names = [name for name in asked.split(",") if name != "none"]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(f"no such {what}: {', '.join(unknown)}; there are {', '.join(known)}")
    return names


def _settings(work: Path, *, device: str, gib: float, every: int, rounds: int, quick_run: bool) -> Settings:
    with stopping.held():
        import torch

    cuda = device != "cpu" and torch.cuda.is_available()
    if device == "cuda" and not cuda:
        raise typer.BadParameter("torch sees no CUDA device")
    settings = defaults.for_machine(work, cuda=cuda, threads=torch.get_num_threads())
    if quick_run:
        settings = defaults.quick(settings)
    if gib:
        settings = replace(settings, state_bytes=int(gib * GIB))
    return replace(settings, every=every or settings.every, rounds=rounds or settings.rounds)


def _environment() -> tuple[str, dict[str, str]]:
    with console.status("installing the peers into .venv-bench"):
        return environment.prepare(_ROOT / ".venv-bench")


class Run:
    """One run of the benchmark. `results` is written to `output` after each measurement: a run that is
    stopped loses only the measurement in progress."""

    def __init__(
        self,
        settings: Settings,
        work: Path,
        python: str,
        failures: dict[str, str],
        timeout_s: float,
        output: Path,
    ) -> None:
        self.settings, self.work, self.python, self.output = settings, work, python, output
        self.failures, self.timeout_s = failures, timeout_s
        self._began = time.time()
        self.results: dict[str, Any] = {
            "machine": machine.describe(work),
            "command": report.command(),
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._began)),
            "settings": settings.to_dict(),
            "limits": [],
            "peers": [],
            "flashckpt": {},
        }

    def all(self, names: list[str], parts: Iterable[str]) -> None:
        limits, measured = self.results["limits"], self.results["peers"]
        limits.append(self._limits())
        self._choose_interval(limits[0])
        self.results["settings"] = self.settings.to_dict()
        for name in names:
            measured.append(self._shown(name, partial(self._peer, name)))
            # Between all peers, so that a disk that slows down in the middle of the run is seen to.
            if not self.settings.quick:
                limits.append(self._limits())
            self._write()
        for part in parts:
            self.results["flashckpt"][part] = self._shown(f"flashckpt: {part}", partial(self._part, part))
            self._write()

    def _write(self) -> list[Path]:
        self.results["seconds"] = time.time() - self._began
        self.results["load_average_after"] = os.getloadavg()
        with stopping.held():
            return report.write(self.results, self.output)

    def show(self) -> None:
        """Print and write what was measured so far."""
        if not self.results["limits"]:
            return
        report.show(self.results, console)
        if self.results["flashckpt"]:
            figures.show(self.results, console)
        for path in self._write():
            console.print(f"written: [bold]{path}[/]")

    def _choose_interval(self, limits: dict[str, Any]) -> None:
        if self.settings.every:
            return
        disk_s = median(limits["write_s"]) if "write_s" in limits else limits["num_bytes"] / GIB
        steps = math.ceil(_INTERVAL * disk_s / min(limits["step_s"]))
        self.settings = replace(self.settings, every=max(2, steps))

    def _limits(self) -> dict[str, Any]:
        settings = replace(self.settings, repetitions=_LIMIT_REPETITIONS)
        session = self._session("limits")
        try:
            with console.status("limits of the machine"):
                return self._process(session, "benchmarks.machine", settings=settings)
        finally:
            self._clean(session)

    def _peer(self, name: str) -> dict[str, Any]:
        """One that fails is tried again: some lose a race at their start now and then, on a busy machine."""
        told = {"name": name, "title": peers.PEERS[name][1]}
        try:
            return {**told, **self._attempt(name)}
        except ProcessFailed as failed:
            first = self._reason(str(failed))
        try:
            return {**told, "failed_first": first, **self._attempt(name)}
        except ProcessFailed as failed:
            return {**told, "failed_first": first, "failed": self._reason(str(failed))}

    def _attempt(self, name: str) -> dict[str, Any]:
        session = self._session(name)
        try:
            result = self._process(session, "benchmarks.measure", peer=name, may_die=True)
            last = result.pop("last")
            result["memory"] = {phase: session.peak(span) for phase, span in result["phases"].items()}
            result["stored_bytes"] = files.num_bytes(session.folder / "data")
            result["load"] = self._load(session, name, last) if result["loads"] else None
            return result
        finally:
            self._clean(session)

    def _load(self, session: Session, name: str, last: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._process(session, "benchmarks.load", peer=name, extra=last)
        except ProcessFailed as failed:
            return {"failed": str(failed)}

    def _part(self, part: str) -> dict[str, Any]:
        session = self._session("flashckpt")
        try:
            return figures.PARTS[part](
                lambda module, extra: self._process(session, module, extra=extra, may_die=True), session
            )
        except ProcessFailed as failed:
            return {"failed": str(failed)}
        finally:
            self._clean(session)

    def _session(self, name: str) -> Session:
        folder = self.work / name
        (folder / "data").mkdir(parents=True)
        return Session(self.python, folder)

    def _process(
        self,
        session: Session,
        module: str,
        *,
        peer: str = "",
        settings: Settings | None = None,
        extra: dict[str, Any] | None = None,
        may_die: bool = False,
    ) -> dict[str, Any]:
        """Run one measuring process; its report, or ProcessFailed with its reason."""
        result = session.folder / f"{module}.result.json"
        result.unlink(missing_ok=True)
        job = Job(
            settings=settings or self.settings,
            peer=peer,
            folder=str(session.folder / "data"),
            result=str(result),
            extra=extra or {},
        )
        path = session.folder / f"{module}.job.json"
        job.write(path)
        failure = ""
        try:
            session.run([module, str(path)], timeout_s=self.timeout_s, may_die=may_die)
        except ProcessFailed as failed:
            failure = str(failed)
        reported = json.loads(result.read_text()) if result.exists() else {}
        if "failed" in reported or not reported:
            raise ProcessFailed(reported.get("failed") or failure or "killed before it could report")
        return reported

    def _reason(self, failure: str) -> str:
        """Why a module is missing is known to the one that could not install it."""
        for distribution, reason in self.failures.items():
            if "ModuleNotFoundError" in failure and distribution.replace("-", "_") in failure.replace(
                "-", "_"
            ):
                return reason
        return failure

    def _clean(self, session: Session) -> None:
        with stopping.held():
            session.clean()
            files.remove(session.folder)

    def _shown(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        began = time.monotonic()
        with console.status(name):
            result = measure()
        outcome = f"[yellow]{result['failed']}[/]" if "failed" in result else "done"
        console.print(f"{name:<24} {time.monotonic() - began:6.0f} s  {outcome}", highlight=False)
        return result
