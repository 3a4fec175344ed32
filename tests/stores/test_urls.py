"""The canonical URL of a run, without secrets. No request is made."""

from pathlib import Path

import pytest

from flashckpt.errors import OptionError
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
