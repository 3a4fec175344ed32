"""The stages of one part of `make gpu`, in the order of what is wanted most. Each has its share of the part's
time, and what is found is written down at once. A stage without time left is reported, and is no failure.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import files
from benchmarks.gpu import machine
from benchmarks.gpu.machine import Interpreter
from benchmarks.gpu.stages import (
    ROOT,
    Budget,
    OutOfTime,
    Record,
    call,
    cut_short_at,
    measure,
    reason_of,
)
from benchmarks.peers import PEERS
from benchmarks.session import Session
from benchmarks.settings import Settings

# Each part fits into ten minutes, with the start of the command, on a machine that ends commands after that.
PARTS = {"tests": ("build", "tests", "ranks"), "bench": ("build", "own", "peers")}
STAGES = tuple(dict.fromkeys(stage for stages in PARTS.values() for stage in stages))
# Shares of what the build leaves.
_WEIGHTS = {"tests": 260.0, "ranks": 120.0, "own": 340.0, "peers": 160.0}
# Seconds that each of our figures may take. Together they are less than the share of `own` in 525 s, where no
# build comes before: a figure that hangs is then a failure, and not one that was cut short.
_OWN_S = {"rates": 50.0, "flashckpt_memory": 80.0, "flashckpt": 90.0, "ways": 75.0, "small": 35.0}
FAILED, NOT_BUILT = 1, 4
_BUILD_S, _PEERS_INSTALL_S, _TESTS_S, _PEER_S = 240.0, 60.0, 600.0, 75.0
_TEST_S = 60.0
# Less than that, and a process would only be started to be killed.
_LEAST_S, _LEAST_PEER_S = 15.0, 30.0
# A test that ends pytest itself costs one more start of it.
_MOST_STARTS = 6
_LOOP = "benchmarks.gpu.loop_cost"
Run = Callable[[float, float], dict[str, Any]]
"""Measures something; takes its limit in seconds, and the time that it is meant to have."""
# So much state is enough to see ranks at work; their jobs are started several times.
_RANKS_S, _RANKS_GIB, _MOST_RANKS = 240.0, 1.0, 8


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What the command line asks for, of one part."""

    out: Path
    stages: list[str]
    peers: list[str]
    tests: str
    folder: Path | None
    device: str
    small: bool
    here: bool
    command: list[str]


class Course:
    """One run of the command. `record.found` is what is written to gpu.json."""

    def __init__(self, wish: Wish, interpreter: Interpreter, budget: Budget) -> None:
        self.wish, self.python, self.interpreter = wish, interpreter.python, interpreter
        self.budget = budget
        self.code = 0
        self.wheels = os.environ.get("WHEELS", "")
        self.log = wish.out / "log.txt"
        self.log.write_text("")
        self.peers_python, self.missing = interpreter.python, dict[str, str]()
        parent = wish.folder or wish.out
        parent.mkdir(parents=True, exist_ok=True)
        self.work = Path(tempfile.mkdtemp(prefix="work-", dir=parent)).resolve()
        described = machine.describe(interpreter, self.work)
        self.settings, smaller = machine.settings_for(
            described, self.work, device=wish.device, small=wish.small
        )
        found: dict[str, Any] = {
            "command": wish.command,
            "environment": {name: os.environ.get(name, "") for name in ("PYTHON", "TORCH", "VENV", "WHEELS")},
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "ended": "",
            "machine": described,
            "settings": self.settings.to_dict(),
            "stages": [],
            "lacks": [],
            "tests": {},
            "own": {},
            "ranks": {},
            "peers": {},
        }
        self.record = Record(wish.out / "gpu.json", found)
        for lacking in filter(None, [smaller, _not_a_gpu(wish)]):
            self.record.lacks(lacking)

    def run(self) -> int:
        """All stages that were asked for, as far as time goes. Returns the exit code."""
        ended = "interrupted"
        try:
            if "build" in self.wish.stages and not self.wish.here and not self._build():
                ended = "not built"
                return NOT_BUILT
            left = [name for name in self.wish.stages if name != "build"]
            while left:
                name = left.pop(0)
                share = self.budget.share(_WEIGHTS[name], sum(_WEIGHTS[later] for later in left))
                self._guarded(name, share)
            ended = "done"
            return self.code
        finally:
            files.remove(self.work)
            self.record.found["ended"] = ended
            self.record.found["seconds"] = round(self.budget.clock() - self.budget.began_s, 1)
            self.record.write()

    def _guarded(self, name: str, share: Budget) -> None:
        stages = {"tests": self._tests, "own": self._own, "ranks": self._ranks, "peers": self._peers}
        try:
            stages[name](share)
        except OutOfTime as out:
            self._left_out(name, out)

    def _left_out(self, name: str, out: OutOfTime) -> None:
        self.record.lacks(f"{name}: {out}")
        self._say(name, str(out), 0.0)

    # ---- build

    def _build(self) -> bool:
        environment = self.interpreter.environment or {}
        if environment.get("TORCH") == "system" and not self.wheels and not machine.reaches_an_index():
            self.record.lacks("a network: only what is installed here was used (more: WHEELS=folder)")
            self.wheels = str(self.work / "none")
            os.mkdir(self.wheels)
        environment = {**environment, "WHEELS": self.wheels}
        try:
            limit_s = self.budget.limit(_BUILD_S)
        except OutOfTime as out:
            self._left_out("build", out)
            return False
        ended = call(
            ["bash", "scripts/environment", "test,demo"],
            limit_s=limit_s,
            log=self.log,
            environment=environment,
        )
        self._say("build", ended.outcome, ended.seconds)
        if ended.code != 0:
            self.record.found["build_log"] = self.log.read_text(errors="replace").splitlines()[-40:]
            self.record.lacks(
                f"a build: {ended.outcome}; the end of its output is in gpu.json, all in log.txt"
            )
            return False
        lacking = ROOT / environment.get("VENV", ".venv") / "lacking.txt"
        for requirement in lacking.read_text().splitlines() if lacking.exists() else ():
            self.record.lacks(f"{requirement} (not installed, and not among the wheels)")
        facts = machine.probe(self.python)
        if isinstance(facts, dict):
            self.record.found["machine"].update(facts)
        return True

    # ---- tests

    def _tests(self, budget: Budget) -> None:
        record = self.wish.out / "tests.jsonl"
        record.write_text("")
        began, limit_s = time.monotonic(), budget.limit(_TESTS_S, least_s=_LEAST_S)
        command = [
            self.python, "-m", "pytest", self.wish.tests, "-m", "gpu", "-q",
            "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider", "-p", "benchmarks.gpu.recorder",
            "--continue-on-collection-errors",
        ]  # fmt: skip
        if "pytest-timeout" in self.record.found["machine"]["versions"]:
            command += [f"--timeout={_TEST_S:.0f}", "--timeout-method=thread"]
        else:
            command += ["--override-ini", "addopts=--strict-markers"]
            self.record.lacks("pytest-timeout: one test that hangs takes the time of those after it")
        environment = {"FLASHCKPT_GPU_RECORD": str(record)}
        outcome = ""
        for _ in range(_MOST_STARTS):
            left_s = limit_s - (time.monotonic() - began)
            if left_s < _LEAST_S / 3:
                break
            before = record.read_text()
            ended = call(command, limit_s=left_s, log=self.log, environment=environment)
            outcome = ended.outcome
            # 0 all passed, 1 some failed, 5 none was left; 1 also where the device was lost: then go on.
            whole = ended.code in (0, 5) or (ended.code == 1 and not _cut_short(record))
            if whole or record.read_text() == before:
                outcome = "done" if whole else outcome
                break
        self.record.found["tests"], missing = _outcomes(record)
        for each in missing:
            self.record.lacks(each)
        self._say("tests", outcome, time.monotonic() - began)
        counts = self.record.found["tests"]["counts"]
        if outcome != "done" or set(counts) - {"passed", "skipped"}:
            self.code = FAILED
        if not counts.get("passed"):
            self.record.lacks("a test that is marked gpu and ran here")

    # ---- our own figures

    def _own(self, budget: Budget) -> None:
        whole = {"alone": 2, "last": True}
        runs: dict[str, Run] = {
            "rates": partial(self._measure, "benchmarks.own.rates"),
            "flashckpt_memory": partial(self._loop, "flashckpt_memory", whole),
            "flashckpt": partial(self._loop, "flashckpt", whole),
            "ways": partial(self._measure, "benchmarks.own.ways"),
            "small": partial(self._measure, "benchmarks.own.small"),
        }
        if self.wish.device != "cuda":
            del runs["ways"]
        left = list(runs)
        while left:
            name = left.pop(0)
            share = budget.share(_OWN_S[name], sum(_OWN_S[later] for later in left))
            self._part(name, share, runs[name])
            if name == "rates":
                self.settings = self._paced(self.settings)

    def _paced(self, settings: Settings) -> Settings:
        """Fewer steps a block where a step is long: a slow GPU must not spend the budget on its own pace."""
        steps = self.record.found["own"].get("rates", {}).get("step_s")
        if not steps or self.wish.small:
            return settings
        wanted = max(8, min(settings.every, int(4.0 / min(steps))))
        if wanted < settings.every:
            self.record.lacks(f"short steps: {min(steps):.2f} s each here, so {wanted} a block")
        self.record.found["settings"]["every"] = wanted
        return replace(settings, every=wanted)

    def _part(self, name: str, budget: Budget, run: Run) -> None:
        began, most_s = time.monotonic(), _OWN_S[name]
        try:
            found = run(budget.limit(most_s, least_s=_LEAST_S), most_s)
        except OutOfTime as out:
            found = {"no_time": str(out)}
        self.record.found["own"][name] = found
        if "failed" in found:
            self.code = FAILED
        if "no_time" in found:
            self.record.lacks(f"own: {name}: {found['no_time']}")
        self._say(f"own: {name}", reason_of(found) or "done", time.monotonic() - began)

    # ---- ranks

    def _ranks(self, budget: Budget) -> None:
        """A job with a rank for each device, or two that share the only one, beside DCP."""
        devices = len(self.record.found["machine"].get("devices", ()))
        world = min(max(2, devices), _MOST_RANKS)
        if self.wish.device == "cuda" and devices < world:
            self.record.lacks("a second GPU: two ranks share one, over gloo and not over NCCL")
        out, began = self.work / "ranks", time.monotonic()
        size = ["--quick"] if self.wish.small else ["--gib", str(_RANKS_GIB)]
        command = [
            self.python,
            "-m",
            "benchmarks",
            "--here",
            "--device",
            self.wish.device,
            "--rounds",
            "1",
            *size,
        ]
        command += ["--ranks", str(world), "--peers", "flashckpt,dcp_async_kept", "--output", str(out)]
        limit_s = budget.limit(_RANKS_S, least_s=_LEAST_S)
        ended = call(command, limit_s=limit_s, log=self.log)
        for path in out.glob("*-ranks.json"):
            self.record.found["ranks"] = json.loads(path.read_text())
        failed = self.record.found["ranks"].get("failed", {})
        for job, reason in failed.items():
            self.record.lacks(f"{job} ranks: {reason}")
        outcome = ended.outcome
        if ended.code is None and limit_s < _RANKS_S:
            outcome = cut_short_at(limit_s)
            self.record.lacks(f"ranks: {outcome}")
        elif ended.code != 0:
            self.code = FAILED
        if any(job.startswith("flashckpt ") for job in failed):
            self.code = FAILED
        self._say("ranks", outcome, time.monotonic() - began)

    # ---- peers

    def _peers(self, budget: Budget) -> None:
        if self.wish.peers and not self.wish.here:
            self._install_peers(budget)
        told = {"alone": 0, "last": False}
        for name in self.wish.peers:
            began = time.monotonic()
            try:
                limit_s = budget.limit(_PEER_S, least_s=_LEAST_PEER_S)
                found = self._loop(name, told, limit_s, _PEER_S, python=self.peers_python)
            except OutOfTime as out:
                found = {"no_time": str(out)}
            found["title"] = PEERS[name][1]
            self.record.found["peers"][name] = found
            reason = reason_of(found)
            if reason and "blocks" not in found:
                self.record.lacks(f"{PEERS[name][1]}: {self._why(reason)}")
            self._say(f"peer: {name}", reason or "done", time.monotonic() - began)

    def _install_peers(self, budget: Budget) -> None:
        report = self.work / "peers.json"
        began, limit_s = time.monotonic(), budget.limit(_PEERS_INSTALL_S, least_s=_LEAST_S)
        folder = ROOT / (".venv-bench" if self.python.endswith("/.venv/bin/python") else ".venv-gpu-bench")
        command = [self.python, "-m", "benchmarks.environment", str(folder), str(report)]
        ended = call([*command, *([self.wheels] if self.wheels else [])], limit_s=limit_s, log=self.log)
        self._say("peers installed", ended.outcome, time.monotonic() - began)
        if report.exists():
            made = json.loads(report.read_text())
            self.peers_python, self.missing = made["python"], made["failures"]
        else:
            self.record.lacks(f"the peers' environment: {ended.outcome}; see log.txt")

    def _why(self, failure: str) -> str:
        """Why a module is missing is known to the one that could not install it."""
        for distribution, reason in self.missing.items():
            if "ModuleNotFoundError" in failure and distribution.replace("-", "_") in failure.replace(
                "-", "_"
            ):
                return reason
        return failure

    # ---- processes

    def _measure(self, module: str, limit_s: float, most_s: float) -> dict[str, Any]:
        session = Session(self.python, Path(tempfile.mkdtemp(dir=self.work)))
        try:
            return measure(session, module, self.settings, limit_s=limit_s, most_s=most_s)
        finally:
            self._close(session)

    def _loop(
        self, peer: str, told: dict[str, Any], limit_s: float, most_s: float, python: str | None = None
    ) -> dict[str, Any]:
        """A peer's loop, and, where a last checkpoint was left, a load of it in a new process."""
        end_s, settings = time.monotonic() + limit_s, self.settings
        session = Session(python or self.python, Path(tempfile.mkdtemp(dir=self.work)))
        try:
            found = measure(session, _LOOP, settings, limit_s=limit_s, most_s=most_s, peer=peer, extra=told)
            last = found.pop("last", None)
            phases = found.get("phases", {})
            found["memory"] = {name: session.peak(span) for name, span in phases.items()}
            if last is not None:
                left_s = max(5.0, end_s - time.monotonic())
                # A load that is ended has failed, unless both had less time than they are meant to have.
                most_s = most_s if limit_s < most_s else left_s
                load = measure(
                    session, "benchmarks.load", settings, limit_s=left_s, most_s=most_s, peer=peer, extra=last
                )
                found["load"] = load
                if "no_time" in load:
                    found["no_time"] = load["no_time"]
                elif load.get("exact") is not True:
                    found.setdefault("failed", load.get("failed", "what was loaded is not what was saved"))
            return found
        finally:
            self._close(session)

    def _close(self, session: Session) -> None:
        session.clean()
        with open(self.log, "a") as log:
            for path in sorted(session.folder.glob("*.log")):
                log.write(f"\n==== {path.name}\n{path.read_text(errors='replace')[-8000:]}")
        shutil.rmtree(session.folder, ignore_errors=True)

    def _say(self, name: str, outcome: str, seconds: float) -> None:
        self.record.stage(name, outcome, seconds)
        print(f"{name:<24} {seconds:6.1f} s  {outcome}", flush=True)


def _not_a_gpu(wish: Wish) -> str:
    return "a GPU: this is a trial of the command on a CPU" if wish.device == "cpu" else ""


def _cut_short(record: Path) -> bool:
    """Whether the last test that began has no end, or has lost the device."""
    entries = [json.loads(line) for line in record.read_text().splitlines()]
    return bool(entries) and (entries[-1]["outcome"] == "begun" or entries[-1].get("device_lost", False))


def _outcomes(record: Path) -> tuple[dict[str, Any], list[str]]:
    """The last word on each test: one that began and has no end took pytest with it, or its time was over.
    And the files that want a package that is not there."""
    last: dict[str, dict[str, Any]] = {}
    for line in record.read_text().splitlines():
        entry = json.loads(line)
        known = last.get(entry["test"])
        if known is None or known["outcome"] in ("begun", "passed"):
            last[entry["test"]] = entry
    for entry in last.values():
        if entry["outcome"] == "begun":
            entry["outcome"] = "did not end"
    missing = []
    for name, entry in list(last.items()):
        told = entry.get("told", "").strip().splitlines()
        if entry["outcome"] == "not collected" and told and "ModuleNotFoundError" in told[-1]:
            missing.append(f"the tests of {name}: {told[-1].removeprefix('E').strip()}")
            del last[name]
    bad = [entry for entry in last.values() if entry["outcome"] not in ("passed", "skipped")]
    found = {
        "counts": dict(Counter(entry["outcome"] for entry in last.values())),
        "not_passed": bad,
        "skipped": sorted({str(entry["told"]) for entry in last.values() if entry["outcome"] == "skipped"}),
        "slowest": sorted(
            ([entry["seconds"], entry["test"]] for entry in last.values() if "seconds" in entry), reverse=True
        )[:5],
    }
    return found, missing


if sys.platform != "linux":
    raise SystemExit("make gpu reads /proc: it runs on Linux only")
