"""A store in a child that its user's process forks, as a loader's worker: it is used, or refused."""

import json
import os
from pathlib import Path

import pytest

from tests import zygote
from tests.stores.s3_server import S3Server

pytestmark = pytest.mark.process

CREATED = ["child: True", "anew: True", "parent: True"]


def lines_of(url: str, when: str, **environment: str) -> list[str]:
    command = ["tests.stores.forked", url, when]
    done = zygote.shared().run(command, env={**os.environ, **environment})
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_a_folder_is_used(tmp_path: Path) -> None:
    names = ["anew", "child", "first", "parent"]
    assert lines_of(str(tmp_path), "after") == ["first: True", *CREATED, str(names)]


def test_an_object_store_is_used_where_its_parent_has_not_used_one(s3_server: S3Server, bucket: str) -> None:
    options = json.dumps(s3_server.options())
    found = lines_of(f"s3://{bucket}/run", "before", FLASHCKPT_STORAGE_OPTIONS=options)
    assert found == [*CREATED, str(["anew", "child", "parent"])]


def test_an_object_store_is_refused_where_a_request_would_never_end(s3_server: S3Server, bucket: str) -> None:
    """Also one that is opened anew: its client's threads are those of the process."""
    options = json.dumps(s3_server.options())
    found = lines_of(f"s3://{bucket}/run", "after", FLASHCKPT_STORAGE_OPTIONS=options)
    refused = found[1:3]
    assert found == ["first: True", *refused, "parent: True", str(["first", "parent"])]
    for name, line in zip(("child", "anew"), refused, strict=True):
        assert line.startswith(f"{name}: process ")
        assert "was forked from one that has used object storage" in line
        assert 'DataLoader(multiprocessing_context="spawn")' in line
