"""No password, key or token appears in errors, tracebacks, logs, or a keeper's command line."""

import logging
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import flashckpt
from flashckpt.errors import FlashckptError, OptionError
from flashckpt.options import Options, Remote
from flashckpt.printable import cause, redacted
from flashckpt.store import fsspec_client, obstore_client, open_store
from tests.conftest import keepers_of
from tests.keeper.fake import FakeTrainer
from tests.stores.proxy import Answer, Proxy, Request

HIDDEN = "S3cr3t"
SECRET = f"{HIDDEN}/+="
KEYS = {"access_key_id": "key", "secret_access_key": SECRET, "session_token": SECRET, "region": "r"}


@pytest.fixture
def refusing() -> Iterator[str]:
    """A server that refuses each request and repeats the request's URL, with secrets, in its answer."""
    with Proxy() as server:
        host = server.endpoint.removeprefix("http://")

        def answer(request: Request) -> Answer:
            url = f"http://user:{SECRET}@{host}{request.path}&X-Amz-Security-Token={SECRET}"
            body = f"<Error><Code>SomethingElse</Code><Message>{url} \x1b[2J</Message></Error>"
            return Answer(400, body=body.encode())

        server.fault = answer
        yield server.endpoint


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(obstore_client, "_BRIEF_DEADLINE_S", 0.2)
    monkeypatch.setattr(fsspec_client, "_DEADLINE_S", 0.2)


def shown(act: Any, caplog: pytest.LogCaptureFixture) -> str:
    """Everything that a user sees after a failure: message, traceback with causes, logs."""
    with caplog.at_level(logging.DEBUG, "flashckpt"):
        try:
            act()
        except (FlashckptError, OSError) as error:
            return "".join([str(error), *traceback.format_exception(error), caplog.text])
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("name", "endpoint"),
    [
        ("endpoint", f"http://user:{SECRET}@127.0.0.1:1"),
        ("endpoint_url", f"http://user:{SECRET}@127.0.0.1:1"),
        ("endpoint", f"http://127.0.0.1:1/?token={SECRET}"),
        ("endpoint", f"http://user:{SECRET}@bad host"),
        ("AWS_ENDPOINT_URL", f"http://user:{SECRET}@127.0.0.1:1"),
    ],
)
def test_an_endpoint_with_a_secret_is_refused_unseen(
    name: str, endpoint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options = {name: endpoint} if name.islower() else {}
    monkeypatch.setenv("AWS_ENDPOINT_URL", "" if options else endpoint)
    text = shown(lambda: open_store("s3://bucket/run", {**KEYS, **options}), caplog)
    assert "endpoint has a user, a password" in text
    assert HIDDEN not in text


def test_an_endpoint_that_is_not_a_server_is_refused() -> None:
    for endpoint in ("127.0.0.1:9000", "http://bad host", "ftp://127.0.0.1", "http://"):
        with pytest.raises(OptionError, match="not a server's URL"):
            open_store("s3://bucket/run", {**KEYS, "endpoint": endpoint})


@pytest.mark.parametrize("how", ["refuses", "does not answer", "through a proxy", "sftp"])
def test_secrets_in_texts_of_servers_and_clients_are_masked(
    how: str, refusing: str, caplog: pytest.LogCaptureFixture
) -> None:
    url, options = "s3://bucket/run", {**KEYS, "endpoint": refusing}
    if how == "does not answer":
        options["endpoint"] = "http://127.0.0.1:1"
    elif how == "through a proxy":
        options["proxy_url"] = f"http://user:{HIDDEN}@127.0.0.1:1"
    elif how == "sftp":
        url, options = "sftp://127.0.0.1:1/runs/one", {"username": "user", "password": SECRET}
    store = open_store(url, options).brief()
    for act in (
        lambda: store.read("name", 100),
        lambda: store.create("name", b"1"),
        lambda: store.list(""),
        lambda: store.remove("name"),
    ):
        text = shown(act, caplog)
        assert HIDDEN not in text
        assert "\x1b" not in text


@pytest.mark.parametrize(
    "url",
    [
        f"s3:/key:{SECRET}@bucket/run",
        f"file://key:{SECRET}@host/run",
        f"s3://key:{SECRET}@bucket/run",
        f"az://container/run?sig={SECRET}",
        f"https://host/run?sig={SECRET}",
    ],
)
def test_a_run_url_with_a_secret_is_refused_unseen(url: str, caplog: pytest.LogCaptureFixture) -> None:
    assert HIDDEN not in shown(lambda: open_store(url), caplog)


def test_parameters_that_sign_a_request_are_masked() -> None:
    for text in (
        f"http://a:{SECRET}@host:9000/x failed",
        f"https://host/x?sv=1&sig={SECRET}&se=2",
        f"http://host/?X-Amz-Credential={SECRET}&X-Amz-Signature={SECRET}",
        f"'https://host/x?AWSAccessKeyId={SECRET}'",
    ):
        assert HIDDEN not in redacted(text)
        assert "host" in redacted(text)
    assert redacted(f"cannot use {SECRET}", {"password": SECRET}) == "cannot use ***"
    assert redacted("no file /keys/id", {"key_filename": "/keys/id"}) == "no file /keys/id"
    for text in (
        "http://host/a?list-type=2&prefix=b@c",
        "http://127.0.0.1:9000/b/a@b",
        "s3://bucket/me@here/run",
    ):
        assert redacted(text) == text


def test_the_cause_of_an_error_is_not_shown_either() -> None:
    """A traceback prints all of them."""
    before = OSError(f"http://user:{SECRET}@host")
    error = OSError("plain")
    assert cause(error) is error
    error.__context__ = before
    assert cause(error) is None


@pytest.mark.parametrize("answer", ["?token", "a:"])
def test_a_megabyte_of_text_is_masked_quickly(answer: str) -> None:
    """Masking holds the GIL: 12 kB of "?token" took 48 seconds."""
    text = f"http://user:{SECRET}@host {answer * (1_000_000 // len(answer))} http://user:{SECRET}@host"
    assert len(redacted(text)) < 10_000
    assert HIDDEN not in redacted(text)
    assert cause(OSError(text)) is None


def test_a_long_text_is_truncated_before_a_word() -> None:
    """A URL truncated inside its password can no longer be recognized."""
    for cut in range(len(SECRET) + 20):
        text = f"{'a ' * 4096}"[: 8192 - cut] + f" https://user:{SECRET}@host"
        assert HIDDEN not in redacted(text)
        assert redacted(text).endswith(" …") == (len(text) > 8192)


def test_options_show_no_secret() -> None:
    given = Options(storage_options=KEYS, remote_storage_options=KEYS)
    assert HIDDEN not in f"{given!r}{Remote(url='s3://bucket/run', options=KEYS)!r}"


def test_misplaced_storage_options_are_refused_unseen(
    tmp_path: Path, runtime: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a keyword of attach they would be part of the state and of each checkpoint."""
    calls: list[dict[str, Any]] = [
        {"storage_options": dict(KEYS)}, {"remote_storage_options": dict(KEYS)}, {"options": dict(KEYS)},
    ]  # fmt: skip
    for wrong in calls:
        model = nn.Linear(2, 2)
        text = shown(lambda: flashckpt.attach(tmp_path / "run", model=model, **wrong), caplog)  # noqa: B023
        assert "flashckpt.Options(" in text
        assert HIDDEN not in text


def test_a_keeper_neither_shows_nor_writes_options(tmp_path: Path, runtime: Path) -> None:
    run = tmp_path / "run"
    remote = Remote(url=str(tmp_path / "remote"), options={"secret_access_key": SECRET})
    trainer = FakeTrainer(run, runtime, remote=remote)
    [pid] = keepers_of(runtime)
    assert HIDDEN.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    trainer.end()
    for folder, _, names in (*os.walk(tmp_path), *os.walk(runtime)):
        for name in names:
            path = Path(folder, name)
            assert not path.is_file() or HIDDEN.encode() not in path.read_bytes()
