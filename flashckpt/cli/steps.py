"""`flashckpt ls | verify | branch | prune | export`: the committed steps of a run."""

from __future__ import annotations

import time
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from flashckpt.cli import command
from flashckpt.cli.command import (
    AsJson,
    Bar,
    ExitCode,
    Remote,
    Run,
    Step,
    ends,
    fields_of,
    notices,
    number,
    remote_of,
    results,
    size,
    step_name,
    text,
    word,
    write_json,
)
from flashckpt.cli.history import StepRow, step_rows, waiting, waiting_text
from flashckpt.commit import lineage
from flashckpt.commit.assets import read_assets
from flashckpt.commit.verification import Report
from flashckpt.commit.verification import verify as read_again
from flashckpt.commit.view import View, open_run
from flashckpt.errors import DamagedError, OptionError
from flashckpt.format.names import CommitName
from flashckpt.options import Keep
from flashckpt.replication.mirror import known_remote
from flashckpt.store import open_store
from flashckpt.store.base import Store

if TYPE_CHECKING:
    from flashckpt.export.step import Exported as ExportResult
    from flashckpt.recovery.storage import Pruning


class Format(str, Enum):
    SAFETENSORS = "safetensors"
    TORCH = "torch"
    DCP = "dcp"
    HF = "hf"


AllBranches = Annotated[bool, typer.Option("--all", help="Show the steps of other branches too.")]
Target = Annotated[
    str, typer.Argument(metavar="STEP[@ATTEMPT]", help="A visible step, or one of another branch.")
]
KeepLast = Annotated[
    int, typer.Option("--keep-last", metavar="N", min=1, help="Keep the newest N; at least 2 always stay.")
]
EverySteps = Annotated[
    int | None, typer.Option("--every-steps", metavar="K", min=1, help="Keep every multiple of K, too.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Change nothing: list the steps that would be deleted.")
]
Verified = Annotated[
    str | None, typer.Argument(metavar="STEP[@ATTEMPT]", help="Every visible one if left out.")
]
Out = Annotated[str, typer.Argument(metavar="OUT", help="The file or folder to write.")]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="NAME", help="A part of the state (model), or a leaf. May be repeated."),
]
As = Annotated[
    Format,
    typer.Option(
        "--format",
        help="torch: a file for torch.load(weights_only=True). dcp: a folder for torch's DCP. hf: a folder "
        "for from_pretrained.",
    ),
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", metavar="DTYPE", help="Of floating-point tensors: bf16, fp16, fp32.")
]
MaxShardSize = Annotated[
    str | None,
    typer.Option(
        "--max-shard-size", metavar="SIZE", help="A folder of files up to SIZE (5GB), and an index."
    ),
]
Config = Annotated[
    str | None,
    typer.Option(
        "--config", metavar="FOLDER", help="hf: take config and tokenizer from here, not from the run."
    ),
]
ByRank = Annotated[
    bool, typer.Option("--by-rank", help="A folder with a file for what each rank's own files hold.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace OUT if it is there.")]


# ---- ls


@ends
def ls(run: Run, all_branches: AllBranches = False, as_json: AsJson = False) -> ExitCode:
    """List the committed steps, newest last, and mark the one that a start resumes from if nothing newer is
    in memory. Ends with 1 if files of a step are damaged or missing, or if a start would be refused: then all
    branches are listed."""
    store = open_store(run)
    view = open_run(store, create=False)
    choice = lineage.next_start(view, is_start=False)
    lost = "" if choice.refusal is None else str(choice.refusal)
    first = next((each.name for each in choice.candidates), None)
    rows, waits = step_rows(store, all_branches=all_branches or bool(lost)), waiting(store)
    remote = known_remote(store)
    if as_json:
        plain = {
            "steps": [{**_plain_row(row), "next": row.name == first} for row in rows],
            "passed_over": list(choice.passed_over),
            "waiting": waits,
            "remote": remote or None,
        }
        write_json({"run": store.url, "run_id": view.run_id, **plain, "problem": lost or None})
    elif rows:
        results().print(_step_table(rows, all_branches or bool(lost), first))
    else:
        notices().print(f"{store.url} has no committed step yet.")
    if remote and not as_json:
        notices().print(f"The run has a remote: {remote}")
    for passed in () if as_json else choice.passed_over:
        notices().print(f"Passed over: {passed}", style="yellow")
    for each in () if as_json else waits:
        notices().print(waiting_text(each), style="yellow")
    if lost:
        notices().print(lost, style="red")
    return ExitCode.DAMAGED if lost or any(row.problem for row in rows) else ExitCode.WELL


def _step_table(rows: list[StepRow], all_branches: bool, first: CommitName | None) -> Table:
    notes = {row.name: _notes(row, row.name == first) for row in rows}
    noted = any(notes.values())
    several = any(row.world is not None and row.world > 1 for row in rows)
    columns = [number("step", "bold"), word("attempt"), *[number("ranks")] * several, number("size")]
    columns += [number("leaves"), word("committed")]
    columns += [word("branch")] * all_branches + [text("notes")] * noted
    table = command.table(*columns)
    for row in rows:
        cells = [
            str(row.name.step),
            str(row.name.id if row.is_ambiguous else row.name.attempt),
            *["?" if row.world is None else f"{row.world:,}"] * several,
            "?" if row.num_bytes is None else size(row.num_bytes),
            "?" if row.leaves is None else f"{row.leaves:,}",
            command.local_time(row.committed_at_s),
        ]
        cells += ["this" if row.visible else "other"] * all_branches + [notes[row.name]] * noted
        table.add_row(*cells, style="red" if row.problem else None)
    return table


def _notes(row: StepRow, is_next: bool) -> str:
    notes = [row.problem] * bool(row.problem) + ["a start resumes from it"] * is_next
    if row.damage is not None and row.damage[1]:
        notes.append(f"damaged, found on {row.damage[0]}: {row.damage[1]}")
    return "; ".join(notes)


def _plain_row(row: StepRow) -> dict[str, object]:
    return {
        **fields_of(row.name),
        "visible": row.visible,
        "world": row.world,
        "num_bytes": row.num_bytes,
        "leaves": row.leaves,
        "committed_at": command.iso_time(row.committed_at_s),
        "damage": None if row.damage is None else dict(zip(("host", "reason"), row.damage, strict=True)),
        "problem": row.problem or None,
    }


# ---- branch


@ends
def branch(run: Run, step: Target, as_json: AsJson = False) -> ExitCode:
    """Resume from another step at the next start of the run. Nothing is deleted.

    Refused while a job holds the run; a job on another machine is watched for a few seconds first.
    """
    from flashckpt.runs import branch as start_at

    store = open_store(run)
    target, at = step_name(step)
    assert target is not None
    name = start_at(run, target, None if at is None else str(at))
    view = View.of(store)
    snapshot = view.parent
    parent = None if snapshot is None else str(snapshot.attempt)
    found = None if snapshot is None else lineage.damage(view, snapshot)
    reason = None if found is None else found[1]
    if as_json:
        plain = {"boundary": None if snapshot is None else snapshot.boundary, "damage": reason}
        write_json({"run": store.url, "attempt": name, "step": target, "parent": parent, **plain})
    else:
        results().print(
            f"The next start of {store.url} resumes from step {target} of attempt {parent}. Later steps stay "
            f"as another branch: `flashckpt ls {run} --all` shows them. (This branch is attempt {name}.)"
        )
    if found is not None:
        notices().print(
            f"flashckpt: step {target} failed verification on {found[0]}: {reason}. A start verifies it "
            "again, and resumes from an older step if it is damaged.",
            style="yellow",
        )
    return ExitCode.WELL


# ---- prune


@ends
def prune(
    run: Run,
    keep_last: KeepLast,
    every_steps: EverySteps = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> ExitCode:
    """Delete the older visible steps. May run beside a job.

    Never deleted: the newest two whole steps without a failed verification, all newer ones, and steps of
    other branches.
    """
    from flashckpt.recovery.storage import prune as delete_older

    keep = Keep(last=keep_last, every_steps=every_steps)
    done = delete_older(open_store(run), keep, dry_run=dry_run)
    if as_json:
        write_json(done)
    else:
        _print_pruned(done)
    return ExitCode.WELL


def _print_pruned(done: Pruning) -> None:
    if done.gone:
        gone = "would go" if done.dry_run else "gone"
        table = command.table(number(gone), word("attempt"), number("size"))
        for each in done.gone:
            table.add_row(str(each.name.step), str(each.name.attempt), size(each.num_bytes))
        results().print(table)
    total = size(sum(each.num_bytes for each in done.gone))
    kept = ", ".join(map(str, done.kept)) or "none"
    deleted = "would delete" if done.dry_run else "deleted"
    results().print(f"{deleted} {command.count(len(done.gone), 'step')}, {total}; kept: {kept}")


# ---- verify


@ends
def verify(
    run: Run,
    step: Verified = None,
    all_branches: AllBranches = False,
    remote: Remote = None,
    as_json: AsJson = False,
) -> ExitCode:
    """Read every byte again and compare. Ends with 1 if a file is damaged or missing; changes nothing."""
    store = open_store(run)
    open_run(store, create=False)
    far = remote_of(store, remote)
    plain, code, here = _verified(store, step, all_branches=all_branches, as_json=as_json)
    if far is not None:
        if not as_json:
            results().print(f"the remote, {far.url}:", soft_wrap=True)
        plain["remote"], theirs, there = _verified(far, step, all_branches=all_branches, as_json=as_json)
        code = max(code, theirs)
        if not as_json:
            _print_repairs((store, here), (far, there))
    if as_json:
        write_json(plain)
    return code


def _verified(
    store: Store, step: str | None, *, all_branches: bool, as_json: bool
) -> tuple[dict[str, object], ExitCode, Report]:
    """Verify one store. Returns the result as JSON, the exit code and the report."""
    number, at = step_name(step)
    began_s = time.monotonic()
    with Bar(notices(), "verifying") as bar:
        report = read_again(store, number, at=at, all_steps=all_branches, progress=bar.progress)
    if not as_json:
        _print_report(report, time.monotonic() - began_s)
    lost = ""
    if step is None:
        try:
            read_assets(store)
        except DamagedError as error:
            lost = str(error)
            notices().print(lost, style="red")
    is_whole = report.ok and not lost
    plain: dict[str, object] = {"run": store.url, "ok": is_whole, "num_bytes": report.num_bytes}
    plain |= {"files": report.rows, "problem": lost or None, "remote": None}
    return plain, ExitCode.WELL if is_whole else ExitCode.DAMAGED, report


def _print_report(report: Report, seconds: float) -> None:
    if report.damaged:
        table = command.table(number("step"), *map(text, ("attempt", "file", "status", "what is wrong")))
        for row in report.damaged:
            table.add_row(str(row.step), row.attempt, row.file.rpartition("/")[2], row.status, row.detail)
        results().print(table)
    steps = command.count(len({row.name for row in report.rows}), "step")
    read = f"{len(report.rows)} files of {steps}, {command.size(report.num_bytes)} read in {seconds:.1f} s"
    if report.ok:
        results().print(f"whole: {read}")
    else:
        results().print(f"not whole: {len(report.damaged)} of {read}")


def _print_repairs(*two: tuple[Store, Report]) -> None:
    """For each damaged step of one store, print whether the other can repair it."""
    for (store, report), (other, theirs) in (two, two[::-1]):
        whole = {row.name for row in theirs.rows} - {row.name for row in theirs.damaged}
        for name in sorted({row.name for row in report.damaged}):
            what = f"step {name.step} of attempt {name.attempt} is damaged in {store.url}"
            if name in whole:
                how = f"flashckpt copy {other.url} {store.url} --step {name} --repair"
                text = f"flashckpt: {what} and whole in {other.url}: `{how}` repairs it."
            else:
                text = f"flashckpt: {what}, and not whole in {other.url}: it cannot be repaired from there."
            notices().print(text, style="yellow", soft_wrap=True)


# ---- export


@ends
def export(
    run: Run,
    out: Out,
    format: As = Format.SAFETENSORS,
    step: Step = None,
    only: Only = None,
    dtype: Dtype = None,
    max_shard_size: MaxShardSize = None,
    config: Config = None,
    by_rank: ByRank = False,
    force: Force = False,
    as_json: AsJson = False,
) -> ExitCode:
    """Write the tensors of a step to a file or folder, each whole, for any number of ranks. Every byte is
    verified before OUT gets its name."""
    number, at = step_name(step)
    with Bar(notices(), "exporting") as bar:
        done = _export(
            open_store(run),
            out,
            format,
            config=config,
            by_rank=by_rank,
            step=number,
            at=at,
            only=only or (),
            dtype=dtype,
            max_shard_size=max_shard_size,
            force=force,
            progress=bar.progress,
        )
    if as_json:
        files = [{"file": name, "num_bytes": num_bytes} for name, num_bytes in done.files]
        write_json(fields_of(done) | {"files": files})
    else:
        total = size(sum(num_bytes for _, num_bytes in done.files))
        results().print(
            f"{done.leaves} leaves of step {done.step} of attempt {done.attempt}, {total}, in {out}"
        )
    return ExitCode.WELL


def _export(
    store: Store, out: str, format: Format, *, config: str | None, by_rank: bool, **options: Any
) -> ExportResult:
    if format is not Format.HF:
        from flashckpt.export.step import export as export_step

        if config is not None:
            raise OptionError("--config is for --format hf. Nothing was written.")
        return export_step(store, out, format=format.value, by_rank=by_rank, **options)
    from flashckpt.transformers.exporting import export_step as export_hf

    if by_rank:
        raise OptionError("--by-rank is not for --format hf. Nothing was written.")
    return export_hf(store, out, config=config, **options)
