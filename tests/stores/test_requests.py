"""Number of requests of a run on an object store, counted before a real server."""

import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch

import flashckpt
from flashckpt.commit import lineage
from flashckpt.commit.view import View, open_run
from flashckpt.format.names import CommitName, SnapshotId
from flashckpt.options import Keep
from flashckpt.persist.deletions import Deletions
from flashckpt.persist.job import JobState
from flashckpt.persist.ledger import Event, Ledger, lines_of
from flashckpt.store import open_store
from flashckpt.store.base import Store
from flashckpt.store.objects import ObjectStore
from flashckpt.store.obstore_client import ObstoreClient
from flashckpt.threads import Worker
from tests.commit.runs import commit
from tests.persist.node import Node, begun
from tests.stores.proxy import Proxy
from tests.stores.s3_server import S3Server
from tests.waiting import until

pytestmark = pytest.mark.process


class Counted:
    """A run behind a proxy, which counts requests by operation and file."""

    def __init__(self, proxy: Proxy, server: S3Server, bucket: str) -> None:
        self._proxy, options = proxy, server.options(endpoint=proxy.endpoint)
        self.store: Store = ObjectStore(ObstoreClient(f"s3://{bucket}/run", options))

    def taken(self) -> Counter[str]:
        """Requests since the last call."""
        found, self._proxy.requests[:] = [*self._proxy.requests], []
        return Counter(self._kind(each.method, unquote(each.path)) for each in found)

    @staticmethod
    def _kind(method: str, path: str) -> str:
        if "list-type" in path:
            return "list " + path.partition("prefix=run/")[2].partition("/")[0]
        if path.endswith("?delete"):
            return "delete"
        name = path.rpartition("/")[2]
        file = "version" if "/catalogue/" in path else re.sub(r"-.*(?=\.)|^\d+", "", name)
        return f"{method.lower()} {file}"


@pytest.fixture
def run(s3_server: S3Server, bucket: str) -> Iterator[Counted]:
    with Proxy(s3_server.endpoint) as proxy:
        found = Counted(proxy, s3_server, bucket)
        open_run(found.store, create=True)
        found.taken()
        yield found


def test_a_commit_and_the_deletion_of_an_old_step(run: Counted, tmp_path: Path) -> None:
    attempt, keep = begun(run.store, 1), Keep(last=2)
    node = Node(run.store, tmp_path / "node", attempt, (0,), 1)
    node.queue.set_trainers([replace(each, keep=keep) for each in node.trainers])
    worker = Worker("deletions", os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
    deletions = Deletions(node.store, node.ledger, worker, lambda name, count: None)
    with closing(node), closing(worker):
        for step in (1, 2, 3, 4):
            run.taken()
            node.seal(step)
            node.run()
            assert node.told[-1] == (step, JobState.COMMITTED)
            saved = run.taken()
            outcome = node.outcomes[-1]
            assert outcome.view is not None
            deletions.committed(CommitName(step, attempt, step), keep, outcome.view, outcome.dropped)
            while deletions.is_pending:
                deletions.next()
                worker.wait()
                worker.collect()
            deleted = run.taken()
        node.ledger.close()
    assert View.of(run.store).visible() == (CommitName(3, attempt, 3), CommitName(4, attempt, 4))
    assert saved.pop("put rank.safetensors") == 1, "the data"
    for found in (saved, deleted):
        for each in [each for each in found if "jsonl" in each]:
            del found[each]
    assert saved == {
        "put node.json": 1,
        "put manifest.json": 1,
        "put version": 1,
        "list catalogue": 2,  # the newest version, before the commit and after it
        "list data": 2,  # all files are there, and all of the step before, which retention keeps
        "get manifest.json": 1,
    }
    assert saved.total() == 8, "six, and two for what retention counts"
    assert deleted == {
        "list catalogue": 1,  # it is still this run
        "list data": 2,  # the folders of this attempt, and what is in that of the old step
        "delete": 1,
    }
    assert deleted.total() == 4


def test_simultaneous_ledger_lines_are_one_request(run: Counted) -> None:
    """Lines of several writers do not overwrite each other."""
    books = [Ledger(run.store, stands=lambda: True) for _ in range(3)]
    for step in range(20):
        for each in books:
            each.add("000001-0123abcd", Event.COMMIT, step=step)
    for each in books:
        each.close()
    assert run.taken() == {"put .jsonl": 3}
    assert sorted(line["step"] for line in lines_of(run.store, "000001-0123abcd")) == sorted(3 * [*range(20)])


def test_listings_and_reads_of_a_start(
    s3_server: S3Server, bucket: str, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the trainer, with four checkpoints of four attempts: at most ten before the first part is read."""
    url, asked = f"s3://{bucket}/run", list[str]()
    options = flashckpt.Options(storage_options=s3_server.options())

    def train() -> None:
        with flashckpt.attach(url, w=torch.arange(10), keep=flashckpt.Keep(last=4), options=options) as run:
            for _ in run.epochs(run.completed + 1):
                run.step()

    def noting(name: str) -> Callable[..., object]:
        request = getattr(ObstoreClient, name)

        def noted(client: ObstoreClient, key: str, *more: object) -> object:
            if threading.current_thread() is threading.main_thread():
                asked.append(f"{name} {key}")
            return request(client, key, *more)

        return noted

    for _ in range(4):
        train()
    assert len(flashckpt.steps(url)) == 4
    until(lambda: View.of(open_store(url)).catalogue.ended, "the end of the attempt before")
    for name in ("get", "get_range", "size", "list"):
        monkeypatch.setattr(ObstoreClient, name, noting(name))
    train()
    before_parts = [*takewhile(lambda each: "/node-" not in each, asked)]
    assert "manifest-" in before_parts[-2]
    assert len(before_parts) <= 10, before_parts


def test_one_version_covers_all_steps(run: Counted, s3_server: S3Server, bucket: str) -> None:
    attempt, num_steps = begun(run.store, 1), 400
    directly = ObjectStore(ObstoreClient(f"s3://{bucket}/run", s3_server.options()))

    first = commit(directly, 1, attempt).view.catalogue
    [made] = first.checkpoints
    many = tuple(replace(made, id=SnapshotId(attempt, step), step=step) for step in range(1, num_steps + 1))
    directly.replace(first.path, replace(first, checkpoints=many, committed=many[-1].id).to_bytes())
    run.taken()
    assert lineage.steps(run.store) == [*range(1, num_steps + 1)]
    # The version is known to be the newest one because a second listing has no newer one.
    assert run.taken() == {"list catalogue": 2, "get version": 1}
