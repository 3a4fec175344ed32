"""Faulty or silent object storage: no file is lost, incomplete, or confused with another client's file."""

import errno
import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import flashckpt
from flashckpt.commit import attempts
from flashckpt.commit.assets import write_assets
from flashckpt.errors import OptionError, RunError
from flashckpt.keeper.liveness import RunFolder
from flashckpt.memory.runtime import identity_of
from flashckpt.restore import step_choice
from flashckpt.store import obstore_client
from flashckpt.store.base import write_once
from flashckpt.store.objects import PART_BYTES, ObjectStore
from flashckpt.store.obstore_client import ObstoreClient
from flashckpt.store.read_plan import read_shard
from tests import run_view
from tests.commit.runs import commit
from tests.contracts.flat_store import FlatClient
from tests.contracts.store_contract import Shard
from tests.persist.node import begun
from tests.stores.proxy import Fault, Proxy, Request
from tests.stores.s3_server import SECRET_KEY, S3Server

pytestmark = pytest.mark.process


@pytest.fixture
def store(proxy: Proxy, s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    monkeypatch.setattr(obstore_client, "_FIRST_PAUSE_S", 0.001)
    return opened(f"s3://{bucket}/run", s3_server, endpoint=proxy.endpoint)


@pytest.fixture(scope="module")
def large() -> Iterator[Shard]:
    made = Shard(num_rows=8_000)
    yield made
    os.close(made.region.descriptor)


def opened(url: str, server: S3Server, **options: Any) -> ObjectStore:
    return ObjectStore(client_of(url, server, **options))


def client_of(url: str, server: S3Server, **options: Any) -> ObstoreClient:
    return ObstoreClient(url, server.options(**options))


def puts(proxy: Proxy) -> list[int]:
    return [request.status for request in proxy.requests if request.method == "PUT"]


class First:
    """Faults in the first requests of a method."""

    def __init__(self, count: int, fault: Fault, method: str = "PUT") -> None:
        self._left, self._fault, self._method = count, fault, method
        self._lock = threading.Lock()

    def __call__(self, request: Request) -> Fault:
        with self._lock:
            if request.method != self._method or not self._left:
                return ""
            self._left -= 1
            return self._fault


class EachTwice:
    """The answer to the first PUT of each object is lost, so the client sends it again."""

    def __init__(self) -> None:
        self._seen, self._lock = set[str](), threading.Lock()

    def __call__(self, request: Request) -> Fault:
        with self._lock:
            if request.method != "PUT" or request.path in self._seen:
                return ""
            self._seen.add(request.path)
            return "lose answer"


# ---- requests whose answer is lost, and that are sent again


@pytest.mark.parametrize("fault", ["lose answer", "cut", "refuse"])
def test_a_creation_is_sent_again(store: ObjectStore, proxy: Proxy, fault: Fault) -> None:
    """After a lost answer it finds its own object."""
    proxy.fault = First(1, fault)
    assert store.create("run.json", b"mine") == (fault != "lose answer")
    assert len(puts(proxy)) == 2
    assert store.read("run.json", 100) == b"mine"


def test_an_object_of_another_client_is_never_taken_for_ours(
    store: ObjectStore, proxy: Proxy, s3_server: S3Server, bucket: str, shard: Shard
) -> None:
    other = opened(f"s3://{bucket}/run", s3_server)
    lose, names = First(10, "cut"), set[str]()

    def fault(request: Request) -> Fault:
        found, name = lose(request), request.path.partition("run/")[2]
        if not found or name in names:
            return ""
        names.add(name)
        assert other.create(name, b"theirs")
        return found

    proxy.fault = fault
    assert not store.create("claim.json", b"mine")
    with pytest.raises(FileExistsError):
        write_once(store, "part.json", b"mine")
    with pytest.raises(FileExistsError):
        store.write_shard("shard", shard.layout, shard.region)
    for name in ("claim.json", "part.json", "shard"):
        assert other.read(name, 100) == b"theirs"


def test_a_run_whose_every_creation_is_sent_twice(
    store: ObjectStore, proxy: Proxy, s3_server: S3Server, bucket: str
) -> None:
    """Assets, a counter, frozen leaves, shards, parts, manifests and versions."""
    proxy.fault = EachTwice()
    run_view.make(store)
    assert write_assets(store, {"config.json": b"{}"})
    attempt = begun(store, 1)
    for step in (1, 2):
        assert commit(store, step, attempt, constants=True)
    assert [each.step for each in run_view.visible(store)] == [1, 2]
    assert run_view.verify(store).ok
    name = run_view.next_name(store)
    attempts.reserve(store, name)
    assert attempts.is_reserved(store, name, exclusively=True)
    names = [request.path for request in proxy.requests if request.method == "PUT"]
    assert all(names.count(name) >= 2 for name in names)
    absent = opened(f"s3://{bucket}/other", s3_server, endpoint=proxy.endpoint)
    assert not attempts.is_reserved(absent, name, exclusively=True)


def test_the_check_of_a_server_that_loses_answers_or_overwrites(store: ObjectStore, proxy: Proxy) -> None:
    """Before a run begins."""
    for method in ("PUT", "GET", "POST"):
        proxy.fault = First(1, "lose answer", method)
        store.check()
    run_view.make(store)
    for act in (store.check, lambda: run_view.make(store)):
        lose = First(2, "lose answer")
        proxy.fault = lambda request, lose=lose: lose(request) or "overwrite"  # type: ignore[misc]
        with pytest.raises(RunError, match="overwrites"):
            act()
    assert [entry.name for entry in store.list("")] == ["catalogue"], "it has cleared up"


def test_the_check_of_a_server_that_lists_late(store: ObjectStore, proxy: Proxy) -> None:
    """Its newest version would be missed."""
    proxy.fault = lambda request: "hide" if "list-type" in request.path else ""
    with pytest.raises(RunError, match="does not list"):
        run_view.make(store)
    proxy.fault = lambda request: ""
    assert store.list("") == [], "it has cleared up, and begun nothing"
    run_view.make(store)


def test_a_conflict_is_no_proof_that_a_name_is_taken(
    store: ObjectStore, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(obstore_client, "_CONFLICT_PAUSES_S", (0.0, 0.0))
    proxy.fault = First(2, "conflict")
    assert store.create("version", b"mine")
    assert store.read("version", 100) == b"mine"
    proxy.fault = lambda request: "conflict" if request.method == "PUT" else ""
    with pytest.raises(OSError, match="other creations of it are under way") as caught:
        store.create("other", b"mine")
    assert caught.value.errno == errno.EREMOTEIO
    assert not store.exists("other")


class Sly(FlatClient):
    """It overwrites an object, and says that it has not."""

    def put(self, key: str, data: memoryview, *, is_new: bool = False) -> bool:
        return super().put(key, data) and not is_new


def test_the_check_of_a_server_reads_what_it_has_created(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="overwrites"):
        ObjectStore(Sly(f"flat://{tmp_path}")).check()


# ---- servers that fail


def test_many_refusals_are_retried(store: ObjectStore, proxy: Proxy, shard: Shard) -> None:
    for method in ("PUT", "GET", "HEAD"):
        proxy.fault = First(4, "refuse", method)
        written = store.write_shard(f"{method}/shard", shard.layout, shard.region)
        assert written.digests.tolist() == list(shard.contents.digests)
        read = read_shard(store, f"{method}/shard", shard.contents, None)
        assert not read.bad_chunks
        assert not read.wrong_leaves(shard.contents)


def acts(store: ObjectStore) -> list[Callable[[], object]]:
    return [
        lambda: store.create("a", b"1"),
        lambda: store.read("a", 9),
        lambda: store.read_bytes("a", 0, 9),
        lambda: store.list(""),
        lambda: store.exists("a"),
    ]


def test_a_server_that_stays_away_ends_in_an_error(
    s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(obstore_client, "_DEADLINE_S", 0.5)
    with Proxy("http://127.0.0.1:9", lambda request: "refuse") as away:
        lost = opened(f"s3://{bucket}/run", s3_server, endpoint=away.endpoint)
        for act in (*acts(lost), lambda: lost.remove("a")):
            with pytest.raises(OSError, match="Error performing") as caught:
                act()
            assert caught.value.errno == errno.EREMOTEIO


def test_a_server_that_refuses_large_reads_for_minutes_costs_no_step(
    proxy: Proxy, s3_server: S3Server, bucket: str, runtime: Path, kill_keepers: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Like a server that thousands of ranks ask at once: its error does not mean that the file is damaged."""
    url = f"s3://{bucket}/run"
    options = flashckpt.Options(storage_options=s3_server.options(endpoint=proxy.endpoint))
    weights = {"w": torch.zeros(1000)}
    for expected in (0, 1):
        with flashckpt.attach(url, every=None, options=options, **weights) as checkpointer:
            assert checkpointer.completed == expected
            checkpointer.step()
            checkpointer.save()
            checkpointer.wait()
        kill_keepers(remove_regions=True)
    monkeypatch.setattr(obstore_client, "_DEADLINE_S", 0.2)
    monkeypatch.setattr(step_choice, "_PAUSES_S", (0.0,))
    proxy.fault = lambda request: "refuse" if "00002/rank-" in request.path else ""
    with pytest.raises(RunError, match="503.*The files may be intact"):
        flashckpt.attach(url, every=None, options=options, **weights)
    assert any(request.status == 503 for request in proxy.requests)
    proxy.fault = lambda request: ""
    with flashckpt.attach(url, every=None, options=options, **weights) as checkpointer:
        assert checkpointer.completed == 2


def test_a_sign_of_life_is_not_retried_past_the_next_one(
    proxy: Proxy, s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may refuse a key that is written often for a while; the next sign of life succeeds."""
    monkeypatch.setattr(obstore_client, "_DEADLINE_S", 3600.0)  # a test that waits for it fails of its time
    monkeypatch.setattr(obstore_client, "_BRIEF_DEADLINE_S", 2.0)
    store = opened(f"s3://{bucket}/run", s3_server, endpoint=proxy.endpoint)
    run_view.make(store)
    folder = RunFolder(store, identity_of(run_view.run_id(store), store.place()))
    attempt = begun(store, 1)
    assert not folder.round([attempt], []).problem
    proxy.fault = lambda request: "refuse" if request.method == "PUT" else ""
    proxy.requests.clear()
    assert "503" in folder.round([attempt], []).problem
    assert puts(proxy)
    proxy.fault = lambda request: ""
    assert not folder.round([attempt], []).problem
    assert run_view.signs_of_life(store, attempt) == 3


def test_a_slow_line_does_not_fail_an_upload(
    proxy: Proxy, s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(obstore_client, "_READ_TIMEOUT_S", 0.5)
    monkeypatch.setattr(obstore_client, "_DEADLINE_S", 0.5)
    slow = threading.Event()  # never set: sending takes longer than the read timeout

    def fault(request: Request) -> Fault:
        if "partNumber=1&" in request.path:
            slow.wait(1.5)
        return ""

    proxy.fault = fault
    part = memoryview(bytes(PART_BYTES))
    client = client_of(f"s3://{bucket}/run", s3_server, endpoint=proxy.endpoint)
    client.upload("shard", [part, part], PART_BYTES)
    monkeypatch.undo()
    assert client_of(f"s3://{bucket}/run", s3_server).size("shard") == 2 * PART_BYTES


def test_a_server_that_vanishes_during_an_upload_is_detected(
    proxy: Proxy, s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only after a fast upload; the next try has the longest time again."""
    monkeypatch.setattr(obstore_client, "_LEAST_UPLOAD_S", 0.5)
    monkeypatch.setattr(obstore_client, "_SLOWER", 0.0)
    monkeypatch.setattr(obstore_client, "_DEADLINE_S", 0.1)
    client = client_of(f"s3://{bucket}/run", s3_server, endpoint=proxy.endpoint)
    part, over = memoryview(bytes(PART_BYTES)), threading.Event()
    client.upload("first", [part, part], PART_BYTES)

    def fault(request: Request) -> Fault:
        if "partNumber=1&" in request.path:
            over.wait(240)
        return ""

    proxy.fault = fault
    with pytest.raises(OSError, match="Error performing"):
        client.upload("second", [part, part], PART_BYTES)
    over.set()
    slow = threading.Event()  # never set
    proxy.fault = lambda request: "" if slow.wait(1.0) else ""
    client.upload("second", [part, part], PART_BYTES)
    assert client.size("second") == 2 * PART_BYTES


def test_permanent_errors_are_raised_at_once(s3_server: S3Server, bucket: str) -> None:
    url = f"s3://{bucket}/run"
    with pytest.raises(PermissionError, match="SignatureDoesNotMatch"):
        opened(url, s3_server, secret_access_key="wrong").create("a", b"1")
    for act in acts(opened(url, s3_server, access_key_id="unknown")):
        # The answer to HEAD has no code.
        with pytest.raises(PermissionError, match="InvalidAccessKeyId|performing HEAD"):
            act()
    for act in acts(opened("s3://no-such-bucket/run", s3_server)):
        with pytest.raises(OSError, match="the bucket of s3://no-such-bucket/run does not exist") as caught:
            act()
        assert caught.value.errno == errno.ENODEV


def deny(boto: Any, bucket: str, action: str) -> None:
    resource = f"arn:aws:s3:::{bucket}/*"
    statement = {"Effect": "Deny", "Principal": "*", "Action": [action], "Resource": [resource]}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    boto.put_bucket_policy(Bucket=bucket, Policy=policy)


def test_a_missing_right_to_delete_is_reported_before_a_run_begins(
    s3_server: S3Server, boto: Any, bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Not for full storage: a permanent copy may be the only reason for it."""
    deny(boto, bucket, "s3:DeleteObject")
    store = opened(f"s3://{bucket}/run", s3_server)
    run_view.make(store)
    why = "these credentials may not delete there (these credentials may not do that (AccessDenied))"
    assert why in caplog.text
    with pytest.raises(PermissionError, match="these credentials may not do that"):
        store.remove_files(["catalogue/000000001", "catalogue/other"])
    assert store.exists("catalogue/000000001")


def test_a_missing_right_to_read_is_reported_before_a_run_begins(
    s3_server: S3Server, boto: Any, bucket: str
) -> None:
    """A start of a fresh run reads no other file."""
    deny(boto, bucket, "s3:GetObject")
    store = opened(f"s3://{bucket}/run", s3_server)
    with pytest.raises(PermissionError, match="these credentials may not do that"):
        run_view.make(store)
    assert store.list("") == []


@pytest.mark.every_set
@pytest.mark.parametrize("is_remote", [False, True])
def test_errors_of_the_storage_are_reported_at_attach(
    s3_server: S3Server, bucket: str, tmp_path: Path, runtime: Path, is_remote: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of the run's own storage, and of its remote: then nothing is begun."""
    monkeypatch.setattr(obstore_client, "_DEADLINE_S", 0.5)
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("no-such-bucket", {}, "the bucket of s3://no-such-bucket/run does not exist"),
        # The next call for this URL is judged by its own options.
        (bucket, {"nonsense": "1"}, "nonsense"),
        (bucket, {"secret_access_key": "geheim"}, "the secret key does not belong to this access key"),
        (bucket, {"access_key_id": "unknown"}, "the server does not know this access key"),
    ]
    if not is_remote:  # a remote that does not answer is waited for
        cases.append((bucket, {"endpoint": "http://127.0.0.1:9"}, "Error performing"))
    for name, options, message in cases:
        given, url = s3_server.options(**options), f"s3://{name}/run"
        run, remote = (tmp_path / "run", url) if is_remote else (url, None)
        about = flashckpt.Options(**{"remote_storage_options" if is_remote else "storage_options": given})
        with pytest.raises((RunError, OptionError), match=message) as caught:
            flashckpt.attach(run, remote=remote, options=about, w=torch.zeros(3))
        assert not any(secret in str(caught.value) for secret in ("geheim", SECRET_KEY))
        assert not (tmp_path / "run").exists()


def test_a_bucket_that_is_full(s3_server: S3Server, boto: Any, bucket: str) -> None:
    store = opened(f"s3://{bucket}/run", s3_server)
    assert store.create("a", b"1")
    s3_server.admin("quota", "set", "--quota-scope=bucket", f"--bucket={bucket}", "--max-objects=1")
    s3_server.admin("quota", "enable", "--quota-scope=bucket", f"--bucket={bucket}")
    with pytest.raises(OSError, match="QuotaExceeded") as caught:
        store.create("b", b"1")
    assert caught.value.errno == errno.ENOSPC
    assert store.read("a", 9) == b"1"


def test_a_server_killed_during_an_upload_and_restarted(
    store: ObjectStore, proxy: Proxy, s3_server: S3Server, large: Shard, boto: Any, bucket: str
) -> None:
    assert len(large.image) > 3 * PART_BYTES
    third = threading.Event()

    def fault(request: Request) -> Fault:
        if "partNumber=3" in request.path and not third.is_set():
            third.set()
            return "cut"
        return ""

    proxy.fault = fault
    with ThreadPoolExecutor(1) as pool:
        upload = pool.submit(store.write_shard, "shard", large.layout, large.region)
        assert third.wait(240)
        s3_server.kill()
        s3_server.start()
        written = upload.result()
    assert written.checksums == large.contents.checksums
    assert not read_shard(store, "shard", large.contents, None).bad_chunks
    assert "Uploads" not in boto.list_multipart_uploads(Bucket=bucket)


def test_each_part_has_the_servers_checksum_if_requested(
    proxy: Proxy, s3_server: S3Server, bucket: str, large: Shard
) -> None:
    url, options = f"s3://{bucket}/run", {"endpoint": proxy.endpoint, "checksum_algorithm": "CRC64NVME"}
    store = opened(url, s3_server, **options)
    assert store.create("run.json", b"small")
    store.write_shard("shard", large.layout, large.region)
    assert not read_shard(store, "shard", large.contents, None).bad_chunks
    puts = [request for request in proxy.requests if request.method == "PUT"]
    assert sum("partNumber" in request.path for request in puts) > 1
    assert all("x-amz-checksum-crc64nvme" in request.headers for request in puts)


def test_an_upload_that_fails_leaves_nothing_visible(
    store: ObjectStore, proxy: Proxy, s3_server: S3Server, large: Shard, boto: Any, bucket: str
) -> None:
    proxy.fault = lambda request: "refuse" if "partNumber=2" in request.path else ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(obstore_client, "_DEADLINE_S", 0.5)
        failing = opened(store.url, s3_server, endpoint=proxy.endpoint)
        with pytest.raises(OSError, match="SlowDown|503"):
            failing.write_shard("shard", large.layout, large.region)
    assert not store.exists("shard")
    assert store.list("") == []
    assert "Uploads" not in boto.list_multipart_uploads(Bucket=bucket), "its parts are not paid for"
