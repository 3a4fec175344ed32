"""What one run of the benchmark is asked to do. Every process of the run reads the same settings, from a
JSON file; nothing else is handed from process to process.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Settings:
    """state_bytes: parameters and AdamW's state, fp32 (12 bytes a parameter).
    every: steps from one checkpoint to the next; 0 until the first process has measured a step.
    checkpoints: how many a measured block of steps holds; rounds: pairs of blocks without and with them.
    repetitions: of everything that is measured alone (a call on an idle loop, a limit of the machine).
    threads: of torch, for the loop and for the copies that are its limit.
    folder: where checkpoints go; the disk that is measured.
    """

    folder: str
    state_bytes: int = GIB
    device: str = "cpu"
    layers: int = 12
    batch: int = 1
    length: int = 96
    every: int = 0
    checkpoints: int = 2
    rounds: int = 3
    repetitions: int = 5
    threads: int = 2
    pairs: int = 24
    auto_seconds: float = 160.0

    @property
    def quick(self) -> bool:
        """Too small to say anything about a real machine: for checking that everything still runs."""
        return self.state_bytes < 256 * MIB

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, path: Path) -> Settings:
        return cls(**json.loads(path.read_text()))

    def to_dict(self) -> dict[str, Any]:
        """Return what a report shows: all but the folder, a path of the machine."""
        fields = asdict(self)
        del fields["folder"]
        return fields


def for_machine(folder: Path, *, cuda: bool, threads: int) -> Settings:
    """The default: a state of 1 GiB on a CPU, where a longer batch would only lengthen the run, and of
    8 GiB on a GPU, where a smaller one would be gone before it could be timed."""
    settings = Settings(folder=str(folder), threads=threads)
    if not cuda:
        return settings
    return replace(
        settings, device="cuda", state_bytes=8 * GIB, batch=8, length=1024, rounds=2, repetitions=3
    )


def quick(settings: Settings) -> Settings:
    return replace(
        settings,
        state_bytes=64 * MIB,
        layers=4,
        batch=1,
        length=16,
        every=2,
        checkpoints=1,
        rounds=1,
        repetitions=1,
        pairs=2,
        auto_seconds=2.0,
    )


@dataclass(frozen=True, kw_only=True)
class Job:
    """One process of the run: its settings, the peer it drives, where it reports."""

    settings: Settings
    peer: str
    folder: str
    result: str
    extra: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, path: str) -> Job:
        fields = json.loads(Path(path).read_text())
        return cls(**{**fields, "settings": Settings(**fields["settings"])})

    def reported(self) -> dict[str, Any]:
        """What was reported last; empty if nothing was."""
        path = Path(self.result)
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found

    def report(self, result: dict[str, Any]) -> None:
        """Written whole or not at all: the process may be killed right after, and its parent reads on."""
        path = Path(self.result)
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(result))
        draft.replace(path)
