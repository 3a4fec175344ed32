"""`ls`, `show` and `verify`: what they print of a run, and how they end."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from made_runs import ENVIRONMENT, LEAVES, Ended, MadeRun
from rich.console import Console

from flashckpt.cli.command import Bar
from flashckpt.format import checked_json
from flashckpt.format.names import CommitName
from flashckpt.store import open_store
from tests import run_view
from tests.commit.runs import of_format

pytestmark = pytest.mark.process

Shell = Callable[..., Ended]


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@pytest.fixture
def branched(run: MadeRun) -> MadeRun:
    """Steps 10, 20 and 30 of one attempt, then a second one that went on from 20 and made another 30."""
    first = run.attempt()
    for step in (10, 20, 30):
        run.commit(first, step)
    run.commit(run.attempt(first, 20), 30)
    return run


def test_ls_lists_the_visible_steps_newest_last(branched: MadeRun, shell: Shell) -> None:
    ended = shell("ls", branched.folder, "--json")
    assert ended.code == 0
    rows = ended.json["steps"]
    assert [row["step"] for row in rows] == [10, 20, 30]
    assert [row["attempt"][:6] for row in rows] == ["000001", "000001", "000002"]
    assert all(row["visible"] and row["leaves"] == len(LEAVES) and not row["problem"] for row in rows)
    shard = next(branched.folder.glob("data/000002*/*00030/rank-*"))
    assert rows[2]["num_bytes"] == shard.stat().st_size
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", rows[2]["committed_at"])


def test_ls_all_shows_the_other_branch_too(branched: MadeRun, shell: Shell) -> None:
    rows = shell("ls", branched.folder, "--all", "--json").json["steps"]
    seen = [(row["step"], row["attempt"][:6], row["visible"]) for row in rows]
    assert seen == [
        (10, "000001", True),
        (20, "000001", True),
        (30, "000001", False),
        (30, "000002", True),
    ]
    table = shell("ls", branched.folder, "--all").out
    assert len(re.findall(r"\bother\b", table)) == 1
    assert len(re.findall(r"\bthis\b", table)) == 3


def test_ls_shows_damage_that_was_found_and_stays_well(branched: MadeRun, shell: Shell) -> None:
    first = shell("ls", branched.folder, "--json").json["steps"][0]
    attempt = next(a for a in run_view.attempts(branched.store) if str(a) == first["attempt"])
    run_view.mark_damaged(branched.store, CommitName(10, attempt, 10), "node7", "a digest differs")
    ended = shell("ls", branched.folder, "--json")
    assert ended.code == 0
    assert ended.json["steps"][0]["damage"] == {"host": "node7", "reason": "a digest differs"}
    assert "damaged, found on node7: a digest differs" in shell("ls", branched.folder).out


def test_ls_marks_what_a_start_resumes_from_and_says_what_it_passes_over(
    branched: MadeRun, shell: Shell
) -> None:
    ended = shell("ls", branched.folder, "--json")
    assert [row["step"] for row in ended.json["steps"] if row["next"]] == [30]
    assert ended.json["passed_over"] == []
    next(branched.folder.glob("data/000002*/*00030/rank-*")).unlink()
    ended = shell("ls", branched.folder, "--json")
    assert [row["step"] for row in ended.json["steps"] if row["next"]] == [20]
    [passed] = ended.json["passed_over"]
    assert passed.startswith("step 30 of attempt 000002")
    ended = shell("ls", branched.folder)
    assert "a start resumes from it" in ended.out
    assert "Passed over: step 30" in ended.err


def test_ls_ends_with_1_where_a_shard_is_gone_and_says_which(branched: MadeRun, shell: Shell) -> None:
    shard = next(branched.folder.glob("data/*/*00020/rank-*"))
    shard.unlink()
    ended = shell("ls", branched.folder, "--json")
    assert ended.code == 1
    (row,) = [row for row in ended.json["steps"] if row["problem"]]
    assert (row["step"], row["visible"]) == (20, True), "the catalogue lists it"
    assert shard.name in row["problem"]


def test_ls_of_a_run_without_steps(run: MadeRun, shell: Shell) -> None:
    ended = shell("ls", run.folder)
    assert (ended.code, ended.out) == (0, "")
    assert "no committed step" in ended.err
    assert shell("ls", run.folder, "--json").json["steps"] == []


def test_show_describes_the_newest_step(branched: MadeRun, shell: Shell) -> None:
    shown = shell("show", branched.folder, "--json").json
    assert (shown["step"], shown["attempt"][:6], shown["visible"]) == (30, "000002", True)
    assert shown["environment"] == ENVIRONMENT
    assert [(each["attempt"][:6], each["step"]) for each in shown["lineage"]] == [
        ("000002", 20),
        ("000001", 0),
    ]
    found = {each["name"]: (each["dtype"], each["shape"], each["num_bytes"]) for each in shown["leaves"]}
    assert found == {leaf.name: (leaf.dtype, list(leaf.shape), leaf.num_bytes) for leaf in LEAVES}
    text = shell("show", branched.folder).out
    for expected in ("model.weight", "= model.tied", "64 × 3", "scalar", "resumed from step 20", "2.13.0"):
        assert expected in text


def test_show_takes_a_step_of_another_branch(branched: MadeRun, shell: Shell) -> None:
    first = next(str(a) for a in run_view.attempts(branched.store) if str(a).startswith("000001"))
    shown = shell("show", branched.folder, f"30@{first}", "--json").json
    assert (shown["attempt"], shown["visible"]) == (first, False)


def test_verify_reads_visible_steps_and_all_of_them(branched: MadeRun, shell: Shell) -> None:
    ended = shell("verify", branched.folder, "--json")
    assert (ended.code, ended.json["ok"]) == (0, True)
    assert {row["step"] for row in ended.json["files"]} == {10, 20, 30}
    every = shell("verify", branched.folder, "--all", "--json").json["files"]
    assert len([row for row in every if row["step"] == 30]) == 2 * len(
        [row for row in every if row["step"] == 10]
    )
    one = shell("verify", branched.folder, 20, "--json").json["files"]
    assert {row["step"] for row in one} == {20}
    assert shell("verify", branched.folder).out.startswith("whole: ")


def test_verify_finds_one_flipped_bit_and_ends_with_1(branched: MadeRun, shell: Shell) -> None:
    shard = next(branched.folder.glob("data/*/*00020/rank-*"))
    flip(shard, shard.stat().st_size - 1)
    ended = shell("verify", branched.folder, "--json")
    assert (ended.code, ended.json["ok"]) == (1, False)
    (row,) = [row for row in ended.json["files"] if row["status"] != "ok"]
    assert (row["step"], row["status"], Path(row["file"]).name) == (20, "damaged", shard.name)
    text = shell("verify", branched.folder)
    assert text.code == 1
    assert shard.name in text.out
    assert shell("verify", branched.folder, 10).code == 0


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_a_folder_that_is_no_run_ends_with_3_in_one_paragraph(
    command: str, tmp_path: Path, shell: Shell
) -> None:
    ended = shell(command, tmp_path)
    assert (ended.code, ended.out) == (3, "")
    assert ended.err.startswith("flashckpt: ")
    assert ended.err.count("\n") == 1
    assert "Traceback" not in ended.err
    assert shell(command, tmp_path, "--json").json["error"]["kind"] == "NoSuchStepError"


@pytest.mark.parametrize("command", ["show", "verify", "branch"])
def test_a_step_that_is_not_there_ends_with_3_and_says_what_is(
    command: str, branched: MadeRun, shell: Shell
) -> None:
    ended = shell(command, branched.folder, 25, "--json")
    assert ended.code == 3
    assert ended.json["error"]["kind"] == "NoSuchStepError"
    assert ended.json["error"]["step"] == 25
    assert "30, 20, 10" in ended.err


@pytest.mark.parametrize(
    "arguments",
    [("show", "RUN", "12a"), ("show", "RUN", "30@x"), ("show", "RUN", "-1"), ("ls",), ("ls", "RUN", "--no"),
     ("no-such-command",), ("ls", "gopher://bucket/run"), ("branch", "RUN")],
)  # fmt: skip
def test_wrong_usage_ends_with_2(arguments: tuple[str, ...], run: MadeRun, shell: Shell) -> None:
    ended = shell(*(str(run.folder) if each == "RUN" else each for each in arguments))
    assert ended.code == 2
    assert "Traceback" not in ended.err


def test_a_newer_format_ends_with_3(run: MadeRun, shell: Shell) -> None:
    version = run.folder / "catalogue" / "000000001"
    version.write_bytes(of_format(99, version.read_bytes()))
    assert checked_json.FORMAT < 99
    ended = shell("ls", run.folder, "--json")
    assert (ended.code, ended.json["error"]["kind"]) == (3, "FormatError")


def test_the_shell_starts_without_torch_and_numpy(run: MadeRun) -> None:
    """To import these takes longer than most commands, and an export alone needs them."""
    run.commit(run.attempt(), 10)
    code = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "from flashckpt.cli.main import app\n"
        "for command in ('ls', 'show', 'verify'):\n"
        f"    try: app([command, {str(run.folder)!r}])\n"
        "    except SystemExit as end: assert end.code == 0, (command, end.code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_goes_away_is_no_damage(branched: MadeRun) -> None:
    command = (
        f"{sys.executable} -c 'from flashckpt.cli.main import main; main()' show {branched.folder} --json"
    )
    done = subprocess.run(
        ["bash", "-c", f"{command} | true; echo ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stdout.strip() in ("0", "141")
    assert done.stderr == ""


def test_names_are_never_taken_for_markup(tmp_path: Path, shell: Shell) -> None:
    ended = shell("ls", tmp_path / "[bold]runs[/bold]")
    assert "[bold]runs[/bold]" in ended.err


def test_a_progress_bar_appears_only_when_it_takes_long_and_only_on_a_terminal() -> None:
    def drawn(*, terminal: bool, after_s: float) -> str:
        stream = io.StringIO()
        console = Console(file=stream, force_terminal=terminal, width=100)
        with Bar(console, "verifying", after_s) as bar:
            bar.progress(1 << 20, 4 << 20)
        return stream.getvalue()

    assert "verifying" in drawn(terminal=True, after_s=0.0)
    assert "4.0" in drawn(terminal=True, after_s=0.0)
    assert drawn(terminal=True, after_s=3600.0) == ""
    assert drawn(terminal=False, after_s=0.0) == ""


def test_on_a_terminal_the_table_fits_its_width(branched: MadeRun) -> None:
    parent, child = pty.openpty()
    command = [
        sys.executable,
        "-c",
        "from flashckpt.cli.main import main; main()",
        "ls",
        str(branched.folder),
    ]
    with os.fdopen(parent, "rb", closefd=True) as terminal:
        done = subprocess.run(
            command, stdin=child, stdout=child, stderr=child, env={**os.environ, "COLUMNS": "70"}, timeout=240
        )
        os.close(child)
        text = b""
        while chunk := _read(terminal.fileno()):
            text += chunk
    assert done.returncode == 0
    plain = re.sub(rb"\x1b\[[0-9;]*m", b"", text).decode()
    assert "000002" in plain
    assert max(len(line.rstrip()) for line in plain.splitlines()) <= 70


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:
        return b""


@pytest.mark.parametrize(
    "command",
    [["ls"], ["show"], ["verify"], ["recover"], ["prune", "--keep-last", "2"], ["export"], ["branch"]],
    ids=lambda command: command[0],
)
def test_a_file_in_a_runs_place_is_no_run(tmp_path: Path, shell: Shell, command: list[str]) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("no run")
    more = {"export": [tmp_path / "out"], "branch": [1]}.get(command[0], [])
    for path in (file, file / "gpt"):
        ended = shell(command[0], path, *command[1:], *more)
        assert ended.code == 3, ended.err
        assert f"{path} is no run: it is a file" in ended.err
        assert "Errno" not in ended.err


def test_what_to_do_about_a_damaged_catalogue_works(branched: MadeRun, shell: Shell) -> None:
    before = shell("ls", branched.folder, "--json").json["steps"]
    newest = sorted((branched.folder / "catalogue").iterdir())[-1]
    newest.write_text("rotten")
    ended = shell("ls", branched.folder)
    assert ended.code == 1
    assert newest.name in ended.err
    assert "flashckpt recover" in ended.err
    assert "flashckpt verify" not in ended.err, "it would say the same"
    assert shell("recover", branched.folder).code == 0
    assert shell("ls", branched.folder, "--json").json["steps"] == before
    assert shell("verify", branched.folder).code == 0


def test_what_the_system_refuses_is_said_with_the_run_and_what_it_means(
    branched: MadeRun, shell: Shell
) -> None:
    out = branched.folder.parent / ("long" * 80)
    ended = shell("export", branched.folder, out, "--json")
    assert ended.code == 4
    message = ended.json["error"]["message"]
    assert message.startswith(f"{branched.folder}: [Errno 36]")
    assert "Committed steps are as whole as they were" in message


def test_a_terminal_that_lacks_a_letter_is_told_the_rest(
    branched: MadeRun, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    ended = shell("show", branched.folder)
    assert (ended.code, ended.err) == (0, "")
    assert "model.weight" in ended.out
    odd = branched.folder.with_name("w\udcff")
    branched.folder.rename(odd)
    monkeypatch.delenv("PYTHONIOENCODING")
    for command in ("ls", "show", "verify"):
        ended = shell(command, odd)
        assert ended.code == 0, ended.err


def test_export_gives_a_module_its_own_names_in_shards(branched: MadeRun, shell: Shell) -> None:
    out = branched.folder.parent / "out"
    options = ["--only", "model", "--dtype", "bf16", "--max-shard-size", "1B"]
    ended = shell("export", branched.folder, out, *options, "--json")
    assert ended.code == 0, ended.err
    files = {row["file"] for row in ended.json["files"]}
    assert "model.safetensors.index.json" in files
    assert files < set(os.listdir(out))
    ended = shell("export", branched.folder, out, *options)
    assert ended.code == 2
    assert "is not empty" in ended.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--format", "hf", "--only", "model"], "has no model config"),
        (["--format", "hf", "--by-rank"], "--by-rank is not for"),
        (["--config", "."], "--config is for"),
        (["--dtype", "int8"], "dtype='int8'"),
        (["--max-shard-size", "much"], "a size like 5GB"),
        (["--format", "dcp", "--by-rank"], "one of safetensors, torch"),
        (["--only", "modle"], "It has: "),
    ],
)
def test_exports_that_are_refused_by_name(
    branched: MadeRun, shell: Shell, options: list[str], said: str
) -> None:
    out = branched.folder.parent / "out"
    ended = shell("export", branched.folder, out, *options)
    assert ended.code != 0
    assert said in " ".join(ended.err.split())
    assert not out.exists()


def test_verify_finds_damaged_assets(branched: MadeRun, shell: Shell) -> None:
    run_view.keep_assets(open_store(branched.folder), {"config.json": b"{}"})
    assert shell("verify", branched.folder).code == 0
    flip(branched.folder / "assets.json", 20)
    ended = shell("verify", branched.folder, "--json")
    assert ended.code == 1
    assert "assets.json" in ended.json["problem"]
