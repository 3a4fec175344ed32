"""The order of a run with ranks: limits of the disk, then in each round each peer in turn, so that a slow
minute of the machine falls on all of them. A job that fails is said with its reason; it stops no other.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import direct_io, files, machine, report
from benchmarks.ranks import table
from benchmarks.ranks.peers import PEERS
from benchmarks.session import ProcessFailed, Session
from benchmarks.settings import MIB, Job, Settings

_RANK = "benchmarks.ranks.rank"


class Jobs:
    """`failures`: why a distribution is not there, by its name. `output`: where the raw numbers go."""

    def __init__(
        self,
        settings: Settings,
        work: Path,
        python: str,
        failures: dict[str, str],
        timeout_s: float,
        output: Path,
        console: Console,
    ) -> None:
        self.settings, self.work, self.python, self.output = settings, work, python, output
        self.failures, self.timeout_s, self.console = failures, timeout_s, console

    def all(
        self, names: Sequence[str], worlds: Sequence[int], kinds: Sequence[str], runs: int
    ) -> dict[str, Any]:
        began = time.time()
        results: dict[str, Any] = {
            "machine": machine.describe(self.work),
            "command": report.command(),
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
            "settings": self.settings.to_dict(),
            "disk": [],
            "jobs": [],
            "failed": {},
        }
        for world, kind in ((world, kind) for kind in kinds for world in worlds):
            for number in range(runs):
                results["disk"].append(self._disk())
                for name in names:
                    self._one(results, name, kind, world, number)
                    table.write(results, self.output)  # a run that is killed leaves what it has
        results["seconds"] = time.time() - began
        results["load_average_after"] = os.getloadavg()
        return results

    def _one(self, results: dict[str, Any], name: str, kind: str, world: int, number: int) -> None:
        if (failed := f"{name} {kind} {world}") in results["failed"]:
            return
        job = {"peer": name, "title": PEERS[name][1], "kind": kind, "world": world, "run": number}
        began, load = time.monotonic(), os.getloadavg()[0]
        try:
            job |= self._measured(name, kind, world)
            outcome = "done"
        except ProcessFailed as error:
            results["failed"][failed] = outcome = self._reason(str(error))
        else:
            results["jobs"].append(job | {"load_average": load})
        self.console.print(
            f"{kind:<6}{world:>2} ranks  {name:<20}{time.monotonic() - began:6.0f} s  {outcome}",
            markup=False,
            highlight=False,
        )

    def _measured(self, name: str, kind: str, world: int) -> dict[str, Any]:
        folder = self.work / f"{name}-{kind}-{world}"
        (folder / "data").mkdir(parents=True)
        try:
            saved = self._launch(folder, name, kind, world, {})
            last, loads = saved.pop("last"), {}
            for other in (world, *_others(world)):
                try:
                    loads[str(other)] = self._launch(folder, name, kind, other, {"last": last})
                except ProcessFailed as error:
                    loads[str(other)] = {"failed": str(error)}
            return {**saved, "loads": loads}
        finally:
            files.remove(folder)

    def _launch(
        self, folder: Path, name: str, kind: str, world: int, extra: dict[str, Any]
    ) -> dict[str, Any]:
        """Run a job of so many ranks to its end; the report of its rank 0, or ProcessFailed."""
        session = Session(self.python, folder)
        result = folder / "result.json"
        for old in folder.glob("result*"):
            old.unlink()
        threads = max(1, (os.cpu_count() or 1) // world)
        job = Job(
            settings=replace(self.settings, threads=threads),
            peer=name,
            folder=str(folder / "data"),
            result=str(result),
            extra={**extra, "kind": kind},
        )
        job.write(folder / "job.json")
        failure = ""
        try:
            launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={world}", "-m", _RANK]
            session.run([*launcher, str(folder / "job.json")], timeout_s=self.timeout_s)
        except ProcessFailed as failed:
            failure = str(failed)
        finally:
            session.clean()
        reports = {path: json.loads(path.read_text()) for path in sorted(folder.glob("result*.json"))}
        told = [report["failed"] for report in reports.values() if "failed" in report]
        if told or not result.exists():
            # That another rank is gone is what the others say of the one that knows why.
            told.sort(key=lambda reason: "gloo" in reason or "own store" in reason)
            raise ProcessFailed(next(iter(told), failure or "killed before it could report"))
        report: dict[str, Any] = reports[result]
        return report

    def _disk(self) -> dict[str, Any]:
        """Seconds for the state, written and read with O_DIRECT: what the disk gives in this minute."""
        path, num_bytes = self.work / "direct", -(-self.settings.state_bytes // (16 * MIB)) * 16 * MIB
        try:
            return {
                "num_bytes": num_bytes,
                "write_s": direct_io.write_s(path, num_bytes, direct_io.SHAPES[0]),
                "read_s": direct_io.read_s(path, num_bytes, direct_io.SHAPES[0]),
            }
        except direct_io.DirectRefused as refused:
            return {"refused": str(refused)}
        finally:
            path.unlink(missing_ok=True)

    def _reason(self, failure: str) -> str:
        known = (
            reason
            for name, reason in self.failures.items()
            if "ModuleNotFoundError" in failure and name.replace("-", "_") in failure.replace("-", "_")
        )
        return next(known, failure)


def _others(world: int) -> Iterator[int]:
    """On how many ranks it is loaded beside as many as have saved it: half or twice as many."""
    yield world // 2 if world > 2 else world * 2
