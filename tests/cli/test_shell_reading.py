"""`ls`, `show` and `verify`: what they print of a run, and how they end."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from made_runs import ENVIRONMENT, MadeRun, Shell, leaves_of
from rich.console import Console

from flashckpt.cli.command import Bar
from flashckpt.format import checked_json
from flashckpt.format.names import CommitName
from tests import run_view
from tests.commit.runs import of_format
from tests.folders import flip

pytestmark = pytest.mark.process


@pytest.fixture
def branched(run: MadeRun) -> MadeRun:
    """Steps 10, 20 and 30 of one attempt, then a second one that went on from 20 and made another 30."""
    first = run.attempt()
    for step in (10, 20, 30):
        run.commit(first, step)
    run.commit(run.attempt(first, 20), 30)
    return run


def test_ls_lists_this_branch_and_with_all_the_others(branched: MadeRun, shell: Shell) -> None:
    rows = shell("ls", branched.folder, "--all", "--json").json["steps"]
    assert [(row["step"], row["attempt"][:6], row["visible"]) for row in rows] == [
        (10, "000001", True),
        (20, "000001", True),
        (30, "000001", False),
        (30, "000002", True),
    ]
    table = shell("ls", branched.folder, "--all").out
    assert len(re.findall(r"\bother\b", table)) == 1
    assert len(re.findall(r"\bthis\b", table)) == 3
    ended = shell("ls", branched.folder, "--json")
    assert ended.code == 0
    assert ended.json["steps"] == [row | {"visible": True} for row in rows if row["visible"]]
    rows = ended.json["steps"]
    assert all(row["leaves"] == 3 and not row["problem"] for row in rows)
    shard = next(branched.folder.glob("data/000002*/*00030/rank-*"))
    assert rows[2]["num_bytes"] == shard.stat().st_size
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", rows[2]["committed_at"])


def test_ls_marks_what_a_start_resumes_from_and_says_what_is_wrong(branched: MadeRun, shell: Shell) -> None:
    [first, *_] = run_view.attempts(branched.store)
    run_view.mark_damaged(branched.store, CommitName(10, first, 10), "node7", "a digest differs")
    ended = shell("ls", branched.folder, "--json")
    assert ended.code == 0, "damage that was found before changes no exit code"
    assert ended.json["steps"][0]["damage"] == {"host": "node7", "reason": "a digest differs"}
    assert [row["step"] for row in ended.json["steps"] if row["next"]] == [30]
    assert ended.json["passed_over"] == []
    shard = next(branched.folder.glob("data/000002*/*00030/rank-*"))
    shard.unlink()
    ended = shell("ls", branched.folder, "--json")
    assert ended.code == 1
    [row] = [row for row in ended.json["steps"] if row["problem"]]
    assert (row["step"], row["visible"]) == (30, True), "the catalogue lists it"
    assert shard.name in row["problem"]
    assert [row["step"] for row in ended.json["steps"] if row["next"]] == [20]
    [passed] = ended.json["passed_over"]
    assert passed.startswith("step 30 of attempt 000002")
    ended = shell("ls", branched.folder)
    assert "damaged, found on node7: a digest differs" in ended.out
    assert "a start resumes from it" in ended.out
    assert "Passed over: step 30" in ended.err


@pytest.mark.parametrize("is_link", [False, True])
def test_ls_passes_over_what_is_no_folder_of_a_writer(
    run: MadeRun, shell: Shell, tmp_path: Path, is_link: bool
) -> None:
    first = run.attempt()
    run.commit(first, 10)
    place = run.folder / "data" / str(run.attempt(first, 10))
    place.symlink_to(tmp_path) if is_link else place.write_bytes(b"")
    ended = shell("ls", run.folder, "--json")
    assert ended.code == 0
    assert [row["step"] for row in ended.json["steps"]] == [10]


def test_ls_of_a_run_without_steps(run: MadeRun, shell: Shell) -> None:
    ended = shell("ls", run.folder)
    assert (ended.code, ended.out) == (0, "")
    assert "no committed step" in ended.err
    assert shell("ls", run.folder, "--json").json["steps"] == []


def test_show_describes_the_newest_step_or_that_of_another_branch(branched: MadeRun, shell: Shell) -> None:
    shown = shell("show", branched.folder, "--json").json
    assert (shown["step"], shown["attempt"][:6], shown["visible"]) == (30, "000002", True)
    assert shown["environment"] == ENVIRONMENT
    lineage = [(each["attempt"][:6], each["step"]) for each in shown["lineage"]]
    assert lineage == [("000002", 20), ("000001", 0)]
    found = {each["name"]: (each["dtype"], each["shape"], each["num_bytes"]) for each in shown["leaves"]}
    assert found == {
        each.name: (str(each.whole.dtype), list(each.whole.shape), each.whole.nbytes)
        for each in leaves_of(30)
    }
    text = shell("show", branched.folder).out
    for expected in ("model.weight", "= model.tied", "64 × 3", "scalar", "resumed from step 20", "2.13.0"):
        assert expected in text
    first = str(run_view.attempts(branched.store)[0])
    shown = shell("show", branched.folder, f"30@{first}", "--json").json
    assert (shown["attempt"], shown["visible"]) == (first, False)


def test_verify_reads_visible_steps_or_all_and_finds_one_flipped_bit(branched: MadeRun, shell: Shell) -> None:
    assert shell("verify", branched.folder).out.startswith("whole: ")
    every = shell("verify", branched.folder, "--all", "--json").json["files"]
    assert [row["step"] for row in every].count(30) == 2 * [row["step"] for row in every].count(10)
    one = shell("verify", branched.folder, 20, "--json").json["files"]
    assert {row["step"] for row in one} == {20}

    shard = next(branched.folder.glob("data/*/*00020/rank-*"))
    flip(shard, shard.stat().st_size - 1)
    ended = shell("verify", branched.folder, "--json")
    assert (ended.code, ended.json["ok"]) == (1, False)
    assert {row["step"] for row in ended.json["files"]} == {10, 20, 30}
    (row,) = [row for row in ended.json["files"] if row["status"] != "ok"]
    assert (row["step"], row["status"], Path(row["file"]).name) == (20, "damaged", shard.name)
    text = shell("verify", branched.folder)
    assert text.code == 1
    assert shard.name in text.out
    assert shell("verify", branched.folder, 10).code == 0

    flip(shard, shard.stat().st_size - 1)
    run_view.keep_assets(branched.store, {"config.json": b"{}"})
    assert shell("verify", branched.folder).code == 0
    flip(branched.folder / "assets.json", 20)
    ended = shell("verify", branched.folder, "--json")
    assert ended.code == 1
    assert "assets.json" in ended.json["problem"]


def test_a_folder_that_is_no_run_ends_with_3_in_one_paragraph(tmp_path: Path, shell: Shell) -> None:
    folder = tmp_path / "[bold]runs[/bold]"
    folder.mkdir(parents=True)
    for command in ("ls", "show", "verify"):
        ended = shell(command, folder)
        assert (ended.code, ended.out) == (3, "")
        assert ended.err.startswith("flashckpt: ")
        assert ended.err.count("\n") == 1
        assert str(folder) in ended.err, "a name is never taken for markup"
        assert "Traceback" not in ended.err
        assert shell(command, folder, "--json").json["error"]["kind"] == "NoSuchStepError"


def test_a_step_that_is_not_there_ends_with_3_and_says_what_is(branched: MadeRun, shell: Shell) -> None:
    for command in ("show", "verify", "branch"):
        ended = shell(command, branched.folder, 25, "--json")
        assert ended.code == 3
        assert ended.json["error"]["kind"] == "NoSuchStepError"
        assert ended.json["error"]["step"] == 25
        assert "30, 20, 10" in ended.err


def test_wrong_usage_ends_with_2(run: MadeRun, shell: Shell) -> None:
    path = str(run.folder)
    for arguments in (
        ("show", path, "12a"), ("show", path, "30@x"), ("show", path, "-1"), ("ls",), ("ls", path, "--no"),
        ("no-such-command",), ("ls", "gopher://bucket/run"), ("branch", path),
    ):  # fmt: skip
        ended = shell(*arguments)
        assert ended.code == 2, arguments
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
    command = f"{sys.executable} -m tests.contracts.shell show {branched.folder} --json"
    script = ["bash", "-c", f"{command} | true; echo ${{PIPESTATUS[0]}}"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() in ("0", "141")
    assert done.stderr == ""


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


def test_a_file_in_a_runs_place_is_no_run(tmp_path: Path, shell: Shell) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("no run")
    for name, *more in (
        ["ls"], ["show"], ["verify"], ["recover"], ["prune", "--keep-last", "2"], ["branch", 1],
        ["export", tmp_path / "out"],
    ):  # fmt: skip
        for path in (file, file / "gpt"):
            ended = shell(name, path, *more)
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


def test_what_the_system_refuses_is_said_with_what_it_means(branched: MadeRun, shell: Shell) -> None:
    out = branched.folder.parent / ("long" * 80)
    ended = shell("export", branched.folder, out, "--json")
    assert ended.code == 4
    message = ended.json["error"]["message"]
    assert message.startswith(f"{branched.folder}: [Errno 36]")
    assert "Committed steps are as whole as they were" in message


def test_a_terminal_that_lacks_a_letter_is_told_the_rest(branched: MadeRun, shell: Shell) -> None:
    command = [sys.executable, "-m", "tests.contracts.shell", "show", str(branched.folder)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert "model.weight" in done.stdout
    odd = branched.folder.with_name("w\udcff")
    branched.folder.rename(odd)
    for name in ("ls", "show", "verify"):
        ended = shell(name, odd)
        assert ended.code == 0, ended.err


def test_options_of_an_export_and_those_that_are_refused_by_name(branched: MadeRun, shell: Shell) -> None:
    out = branched.folder.parent / "out"
    for options, said in (
        (["--format", "hf", "--only", "model"], "has no model config"),
        (["--format", "hf", "--by-rank"], "--by-rank is not for"),
        (["--config", "."], "--config is for"),
        (["--dtype", "int8"], "dtype='int8'"),
        (["--max-shard-size", "much"], "a size like 5GB"),
        (["--format", "dcp", "--by-rank"], "one of safetensors, torch"),
        (["--only", "modle"], "It has: "),
    ):
        ended = shell("export", branched.folder, out, *options)
        assert ended.code != 0
        assert said in " ".join(ended.err.split())
        assert not out.exists()
    options = ["--only", "model", "--dtype", "bf16", "--max-shard-size", "1B", "--json"]
    files = {row["file"] for row in shell("export", branched.folder, out, *options).json["files"]}
    assert {"model.safetensors.index.json"} < files < {*os.listdir(out)}
