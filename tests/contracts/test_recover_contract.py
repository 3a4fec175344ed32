"""Interfaces for scripts: words and shapes of the JSON of recover, prune and export, and exit codes."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from flashckpt.cli.recovery import exit_code_of
from flashckpt.commit.attempts import mark_ended
from flashckpt.format.names import AttemptName
from flashckpt.recovery.report import Fate, Finding, Kind, RecoveryReport, Resume
from tests.commit.runs import attempt_at, commit, new_run
from tests.zygote import shared

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "recovery.md"
KINDS = {"snapshot", "parts", "step", "orphans"}
OUTCOMES = {
    "committed", "sound", "was committed", "torn", "failed", "kept", "dropped",
    "quarantined", "was quarantined", "removed",
}  # fmt: skip
KEYS = [
    "run", "run_id", "dry_run", "verified", "keeper", "found", "whole_steps", "num_bytes_read", "resume",
    "resume_problem", "unseen_ranks", "exit_code",
]  # fmt: skip
ROW = ["kind", "outcome", "step", "attempt", "place", "num_bytes", "damage", "detail"]


def shell(*arguments: object) -> subprocess.CompletedProcess[str]:
    return shared().run(["tests.contracts.shell", *map(str, arguments)])


def finding(outcome: Fate, *, damage: bool = False) -> Finding:
    return Finding(kind=Kind.SNAPSHOT, outcome=outcome, place="slot", damage=damage)


def report(*findings: Finding, problem: str = "") -> RecoveryReport:
    resume = None if problem else Resume(step=1, attempt=AttemptName(1, "7fa3c1d2"), tier="local")
    return RecoveryReport(
        run="run",
        run_id="0" * 16,
        dry_run=False,
        verified=True,
        keeper=None,
        findings=findings,
        whole=1,
        num_bytes=0,
        resume=resume,
        resume_problem=problem,
    )


def test_the_document_has_every_word() -> None:
    assert {each.value for each in Kind} == KINDS
    assert {each.value for each in Fate} == OUTCOMES
    rows = set(re.findall(r"^\| `([a-z ]+)` \|", DOCUMENT.read_text(), re.MULTILINE))
    assert rows >= KINDS | OUTCOMES


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (report(), 0),
        (report(finding(Fate.COMMITTED), finding(Fate.KEPT), finding(Fate.DROPPED)), 0),
        (report(finding(Fate.TORN, damage=True), finding(Fate.COMMITTED)), 1),
        (report(finding(Fate.QUARANTINED, damage=True)), 1),
        (report(finding(Fate.QUARANTINED, damage=True), problem="none is whole"), 3),
        (report(finding(Fate.FAILED), finding(Fate.TORN, damage=True)), 4),
        (report(finding(Fate.FAILED), problem="none is whole"), 4),
    ],
)
def test_the_code_of_a_report(found: RecoveryReport, code: int) -> None:
    assert int(exit_code_of(found)) == code


def test_the_shape_of_the_json(tmp_path: Path, runtime: Path) -> None:
    store = new_run(tmp_path / "run")
    attempt = attempt_at(store)
    mark_ended(store, attempt, "closed")
    commit(store, 1, attempt)
    commit(store, 2, attempt)
    [shard] = (tmp_path / "run").glob("data/*/*2/rank*")
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    for dry_run in (True, False):
        done = shell("recover", store.url, "--json", *(["--dry-run"] if dry_run else []))
        told = json.loads(done.stdout)
        assert list(told) == KEYS
        assert [list(row) for row in told["found"]] == [ROW]
        assert told["dry_run"] is dry_run
        assert told["resume"] == {"step": 1, "attempt": str(attempt), "tier": "local", "of_all": True}
        assert done.returncode == told["exit_code"] == 1
    again = json.loads(shell("recover", store.url, "--json", "--no-verify").stdout)
    assert again["verified"] is False
    assert again["found"][0]["outcome"] == "was quarantined"


def test_errors_are_json_too(tmp_path: Path, runtime: Path) -> None:
    for command in (["recover"], ["prune", "--keep-last", "2"], ["export"]):
        out = [str(tmp_path / "out")] if command[0] == "export" else []
        done = shell(command[0], str(tmp_path), *out, *command[1:], "--json")
        assert done.returncode == 3
        assert json.loads(done.stdout)["error"]["kind"] == "NoSuchStepError"


def test_the_shape_of_prune_and_export_and_texts_for_people(tmp_path: Path, runtime: Path) -> None:
    store = new_run(tmp_path / "run")
    attempt = attempt_at(store)
    mark_ended(store, attempt, "closed")
    for step in (1, 2, 3):
        commit(store, step, attempt)
    told = json.loads(shell("prune", store.url, "--keep-last", 2, "--dry-run", "--json").stdout)
    assert list(told) == ["run", "dry_run", "gone", "kept"]
    assert [list(row) for row in told["gone"]] == [["step", "attempt", "boundary", "num_bytes"]]
    assert told["kept"] == [2, 3]
    done = shell("export", store.url, tmp_path / "out", "--step", f"1@{attempt}", "--json")
    told = json.loads(done.stdout)
    assert list(told) == ["run", "step", "attempt", "out", "format", "leaves", "files"]
    assert told["step"] == 1
    assert shell("export", store.url, tmp_path / "out").returncode == 2, "it is there already"
    assert shell("prune", store.url).returncode == 2, "what to keep must be said"
    assert shell("prune", store.url, "--keep-last", 0).returncode == 2

    done = shell("recover", store.url, "--dry-run")
    assert done.returncode == 0
    assert f"training resumes from step 3 of attempt {attempt}, from storage" in done.stdout
    assert "at rest: 3 steps whole" in done.stdout
    pruned = shell("prune", store.url, "--keep-last", 2)
    assert "deleted 1 step" in pruned.stdout
    assert "kept: 2, 3" in pruned.stdout
