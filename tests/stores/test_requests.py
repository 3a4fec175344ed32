"""What a run on an object store costs in requests, counted before a real server."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote

import pytest

from flashckpt.commit import lineage, retention
from flashckpt.commit.attempts import claim, newest_claimed, open_run, start
from flashckpt.commit.holder import here
from flashckpt.commit.verification import verify
from flashckpt.format.names import manifest_path, part_name, shard_name, step_attempt_folder
from flashckpt.format.records import FileRecord, Manifest, PartRecord
from flashckpt.options import Keep, Remote
from flashckpt.persist.job import JobState
from flashckpt.persist.ledger import Event, Ledger, lines_of
from flashckpt.persist.writer import Writer
from flashckpt.store import listing, objects
from flashckpt.store.base import Store
from flashckpt.store.objects import ObjectStore
from flashckpt.store.obstore_client import ObstoreClient
from flashckpt.tiers.step_copy import Outcome
from tests.keeper.fake import FakeTrainer
from tests.keeper.test_keeper_constants import alone as alone
from tests.keeper.test_keeper_constants import order
from tests.persist.node import Node, begun
from tests.stores.proxy import Proxy
from tests.stores.s3_server import S3Server
from tests.tiers.test_node_parts import Nodes

pytestmark = pytest.mark.process


class Counted:
    """A run behind a proxy, whose requests are told apart by what they do to which files."""

    def __init__(self, proxy: Proxy, server: S3Server, bucket: str) -> None:
        self._proxy, options = proxy, {**server.options(), "endpoint": proxy.endpoint}
        self.store: Store = ObjectStore(ObstoreClient(f"s3://{bucket}/run", options))

    def sent_bytes(self) -> int:
        """Of the requests since `taken` was called last."""
        return sum(each.num_bytes for each in self._proxy.requests)

    def taken(self) -> Counter[str]:
        """Of the requests since the last call; not those for run.json, asked for by the clock."""
        found, self._proxy.requests[:] = [*self._proxy.requests], []
        kinds = [self._kind(each.method, unquote(each.path)) for each in found]
        return Counter(kind for kind in kinds if "run.json" not in kind)

    @staticmethod
    def _kind(method: str, path: str) -> str:
        if "list-type" in path:
            return "list " + path.partition("prefix=run/")[2].partition("/")[0]
        if path.endswith("?delete"):
            return "delete"
        name = path.rpartition("/")[2]
        return f"{method.lower()} " + re.sub(r"-.*(?=\.)|^\d+", "", name)


@pytest.fixture
def run(s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    # That a keeper looks at the attempts every second is not left to the clock here.
    monkeypatch.setattr(objects, "RECENT_S", 3600.0)
    with Proxy(s3_server.endpoint) as proxy:
        found = Counted(proxy, s3_server, bucket)
        open_run(found.store, create=True)
        found.taken()
        yield found


def test_a_commit_and_the_deletion_of_an_old_step(run: Counted, tmp_path: Path) -> None:
    attempt = begun(run.store, 1)
    node = Node(run.store, tmp_path / "node", attempt, (0,), 1)
    try:
        for step in (1, 2, 3, 4):
            newest_claimed(run.store.at_once())  # as each round of a keeper does
            run.taken()
            node.seal(step)
            node.run()
            assert node.told[-1] == (step, JobState.COMMITTED)
            saved = run.taken()
            gone = retention.prune(run.store, attempt, Keep(last=2), in_hand=set())
            deleted = run.taken()
        node.ledger.close()
    finally:
        node.close()
    assert [each.step for each in gone] == [2]
    assert saved.pop("put shard.safetensors") == 1, "the data"
    for each in [each for each in saved if "jsonl" in each]:
        del saved[each]
    assert saved == {
        "list steps": 3,  # is it there already; are its shards, before the part; are they, with the manifest
        "put part.json": 1,
        "list attempts": 2,  # whether a newer one has started, before the manifest; or has claimed, after it
        "put manifest.json": 1,
    }
    assert saved.total() == 7
    assert deleted == {
        "list steps": 2,  # what there is; what is left beside the tombstone
        "list attempts": 2,  # whether a newer one has claimed, before the tombstone and after it
        "put manifest.json": 1,  # the tombstone
        "delete": 2,  # all else; the tombstone
    }


def test_constants_are_sent_once_a_run(run: Counted, alone: FakeTrainer) -> None:
    """A second attempt names what the first has sent, and each later commit of either costs as much."""
    constants = alone.image.constants
    assert constants is not None

    def saved(step: int, writer: Writer) -> tuple[int, Counter[str]]:
        newest_claimed(run.store.at_once())
        run.taken()
        assert writer.persist(order(alone, step)).state is JobState.COMMITTED
        return run.sent_bytes(), run.taken()

    alone.attempt = first = begun(run.store, 1)
    writer = Writer(run.store, "0123abcd")
    assert saved(1, writer)[0] > constants.num_bytes + alone.layout.num_bytes
    of_own = saved(2, writer)
    alone.attempt = claim(run.store, here())
    start(run.store, alone.attempt, first, 2, 1)
    writer = Writer(run.store, "4567cdef")
    once, taken = saved(3, writer)
    assert abs(once - of_own[0]) < 1000
    assert taken["put constants.safetensors"] == 0
    of_older = saved(4, writer)
    assert of_older[1] == of_own[1]
    assert abs(of_older[0] - of_own[0]) < 1000
    assert of_own[1] == {
        # As of any step, and whether the constants are there: at first, before the part, with the manifest.
        "list steps": 3,
        "list attempts": 2 + 3,
        "put shard.safetensors": 1,
        "put part.json": 1,
        "put manifest.json": 1,
    }
    assert verify(run.store).ok


def test_lines_of_the_ledger_that_come_together_are_one_request(run: Counted) -> None:
    """And those of several writers overwrite none of another's."""
    books = [Ledger(run.store, stands=lambda: True) for _ in range(3)]
    for step in range(20):
        for each in books:
            each.add("000001-0123abcd", Event.COMMIT, step=step)
    for each in books:
        each.close()
    assert run.taken() == {"put .jsonl": 3}
    assert sorted(line["step"] for line in lines_of(run.store, "000001-0123abcd")) == sorted(3 * [*range(20)])


@pytest.mark.parametrize("num_steps", [400, pytest.param(1000, marks=pytest.mark.long)])
def test_all_steps_are_listed_in_one_walk(
    num_steps: int, run: Counted, s3_server: S3Server, bucket: str
) -> None:
    attempt = begun(run.store, 1)
    directly = ObjectStore(ObstoreClient(f"s3://{bucket}/run", s3_server.options()))

    # Of parts and shards their lengths are looked at.
    row = PartRecord(file=part_name(0), num_bytes=1, checksum="0" * 32)
    shard = FileRecord(file=shard_name(0, "5f2c0a1b"), num_bytes=1)

    def make(step: int) -> None:
        folder = step_attempt_folder(step, attempt)
        for file in (row.file, shard.file):
            directly.replace(f"{folder}/{file}", b"1")
        made = Manifest(step=step, attempt=attempt, world=1, parts=(row,), shards=(shard,), constants=())
        directly.replace(manifest_path(step, attempt), made.to_bytes())

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(make, range(1, num_steps + 1)))
    run.taken()
    assert lineage.steps(run.store) == [*range(1, num_steps + 1)]
    # Three files a step, a thousand names a page, and an empty one; what each manifest names.
    taken = run.taken()
    assert taken.pop("list steps") <= 1 + -(-3 * num_steps // 1000)
    assert taken == {"list attempts": 1, "get manifest.json": num_steps}


def test_each_part_of_another_node_that_comes_is_read_once(
    s3_server: S3Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By each node that has sent its own. Of large parts nothing is kept with what was read lately."""
    monkeypatch.setattr(listing, "_MAX_BYTES", 0)
    url, node_count = f"s3://{bucket}/run", 8
    with Proxy(s3_server.endpoint) as proxy:
        options = {**s3_server.options(), "endpoint": proxy.endpoint}
        nodes = Nodes(tmp_path, remote=Remote(url=url, options=options), world=node_count)
        nodes.add(1)
        counted = Counted(proxy, s3_server, bucket)
        for node in range(node_count):
            copied = nodes.bring(node).copied
            assert copied is not None
            for earlier in range(node if node < node_count - 1 else 0):
                counted.taken()
                assert nodes.bring(earlier).newest is None
                taken = counted.taken()
                small = {"get .json", "get start.json"}
                assert {kind: n for kind, n in taken.items() if kind not in small} == {
                    "list attempts": 1,
                    "list steps": 1,
                    "get part.json": 1,
                }
        assert copied.outcome is Outcome.COPIED
        assert nodes.steps() == [1]
