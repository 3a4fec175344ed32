"""How a run is named: URLs, without secrets, and paths that no shell has expanded. No request is made."""

from pathlib import Path

import pytest

import flashckpt
from flashckpt.errors import OptionError
from flashckpt.export.step import Request
from flashckpt.importing.source import open_source
from flashckpt.options import user_path
from flashckpt.store import obstore_client, open_store, options_of

S3 = {"region": "us-east-1", "access_key_id": "id", "secret_access_key": "geheim"}


@pytest.mark.parametrize(
    "url", ["s3://bucket/run", "S3://bucket/run", "s3://bucket/run/", "s3://bucket/run//"]
)
def test_equivalent_urls_name_one_run(url: str) -> None:
    store = open_store(url, S3)
    assert store.url == "s3://bucket/run"
    assert store.place() == open_store("s3://bucket/run", S3).place()
    assert options_of(store.url) == S3, "the keeper is started with them"


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/lr#1", "s3://bucket/run?sig=geheim", "s3://bucket/my%20run", "s3://bucket/a//b",
        "s3://bucket/a/../b", "s3://bucket/./b", "s3://bucket/a\nb", "s3://key:geheim@bucket/run",
        "s3://bucket/run ", "s3://bucket/run\u00a0/", "s3://bucket:80/run", "gs://bucket:443/run",
    ],
)  # fmt: skip
def test_ambiguous_urls_are_refused(url: str) -> None:
    with pytest.raises(OptionError, match="Nothing was changed") as caught:
        open_store(url, S3)
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize("text", [Path("s3://bucket/run"), " s3://bucket/run", "file:/runs/one", "gs:/b/run"])
def test_a_mistyped_url_is_not_taken_for_a_folder(text: str | Path) -> None:
    """Training into ./s3:/bucket/run would seem to work, and be lost with the machine."""
    with pytest.raises(OptionError, match=r"looks like one: it would name a folder.* Nothing was changed"):
        open_store(text)
    assert open_store("./s3:/bucket/run").url.endswith("/s3:/bucket/run")


def test_buckets_of_one_name_on_two_servers_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """A keeper of the run on the first server must not serve this run."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    one, other = "https://one.example", "https://other.example"
    places = [open_store("s3://bucket/run", {**S3, "endpoint": each}).place() for each in (one, other)]
    assert len(set(places)) == 2
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"{one}/")
    assert open_store("s3://bucket/run", S3).place() == places[0]
    accounts = [{"account_name": each, "account_key": "Z2VoZWlt"} for each in ("a", "b")]
    assert len({open_store("az://container/run", each).place() for each in accounts}) == 2


def test_missing_credentials_are_reported() -> None:
    """obstore tries the machine's role last, and its error is about that request."""
    asked = RuntimeError(
        "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 2 ms"
    )
    assert "no credentials were found" in obstore_client._first_line(asked)


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
