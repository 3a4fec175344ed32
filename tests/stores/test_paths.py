"""Paths that no shell has expanded: a quoted argument, a configuration, a default in a program."""

from pathlib import Path

import pytest

import flashckpt
from flashckpt.errors import OptionError
from flashckpt.export.step import Request
from flashckpt.importing.source import open_source
from flashckpt.options import user_path
from flashckpt.store import open_store


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home, work = tmp_path / "home", tmp_path / "work"
    for folder in (home, work):
        folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(work)
    return home


@pytest.mark.parametrize("path", ["~/runs/x", Path("~/runs/x"), "~//runs/x/"])
def test_the_home_folder_is_what_a_shell_takes_for_it(home: Path, path: str | Path) -> None:
    assert open_store(path).url == str(home / "runs/x")


@pytest.mark.parametrize(
    "path",
    [
        "runs/x~", "~unknown-user/x", "a/~b", "a/$", "a/$1", "100$/x",
        # A folder of such a name that is there: the keeper opens the same path.
        "odd/$HOME/run", "odd/~/run",
    ],
)  # fmt: skip
def test_a_name_that_a_shell_does_not_expand_is_a_name(home: Path, path: str) -> None:
    folder = home.parent / "work" / path
    if path.startswith("odd/"):
        folder.parent.mkdir(parents=True)
    assert open_store(path).url == str(folder)


@pytest.mark.parametrize("path", ["$HOME/runs", "runs/${USER}/x", "runs/x-$SLURM_JOB_ID", "base/~/runs"])
def test_a_name_that_a_shell_would_replace_is_refused(home: Path, path: str) -> None:
    with pytest.raises(OptionError, match="which only a shell replaces.* Nothing was changed"):
        open_store(path)
    assert not list((home.parent / "work").iterdir())


def test_a_url_is_no_path(home: Path) -> None:
    assert open_store("file:///a/~/$HOME").url == "/a/~/$HOME"


def test_all_paths_of_a_call_are_expanded_or_refused(home: Path) -> None:
    model, where = [1.0], home / "run"
    with pytest.raises(OptionError, match="only a shell replaces"):
        flashckpt.attach(where, remote="$SCRATCH/run", own={"model": model})
    with pytest.raises(OptionError, match="only a shell replaces"):
        flashckpt.attach(where, cache="$SCRATCH", own={"model": model})
    assert not where.exists()
    with pytest.raises(OptionError, match=f"{home}/no-such-file does not exist"):
        open_source("~/no-such-file")
    assert Request(out="~/out", format="safetensors").out == str(home / "out")
    assert user_path("~") == str(home)
