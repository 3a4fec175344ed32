"""A signal ends a read of storage that never answers, whatever reads."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import flashckpt
from tests.faults.conftest import READ, Faults
from tests.processes import keepers_of
from tests.stores.conftest import boto, bucket, in_environment, proxy, s3_server
from tests.stores.proxy import Fault, Proxy, Request
from tests.waiting import until

__all__ = ["boto", "bucket", "in_environment", "proxy", "s3_server"]

pytestmark = pytest.mark.process

_PROGRAM = """
import signal, sys, torch, flashckpt
from flashckpt.store import obstore_client

obstore_client._READ_TIMEOUT_S = obstore_client._DEADLINE_S = 3600.0

def ended(number, frame):
    print("signal", flush=True)
    raise KeyboardInterrupt

signal.signal(int(sys.argv[3]), ended)
torch.set_num_threads(1)
what, run = sys.argv[1:3]
if what == "attach":
    flashckpt.attach(run, every=None, model=torch.nn.Linear(3584, 4096, bias=False))
elif what == "export":
    from flashckpt.export.step import export
    from flashckpt.store import open_store
    export(open_store(run), sys.argv[4])
else:
    getattr(flashckpt, what)(run)
"""


@pytest.mark.parametrize(
    ("what", "number"),
    [
        ("attach", signal.SIGINT),
        ("verify", signal.SIGINT),
        pytest.param("attach", signal.SIGTERM, marks=pytest.mark.long),
        pytest.param("load", signal.SIGINT, marks=pytest.mark.long),
        pytest.param("export", signal.SIGINT, marks=pytest.mark.long),
    ],
)
def test_a_signal_ends_a_read_that_hangs(
    what: str,
    number: signal.Signals,
    tmp_path: Path,
    runtime: Path,
    faults: Faults,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = tmp_path / "run"
    save(run)
    until(lambda: not keepers_of(runtime), "the keeper to leave, with what it has in memory")
    [shard] = run.glob("data/*/*/rank-*")
    monkeypatch.setenv("FAULT_FOLDER", str(shard))
    faults.become("hang", READ)
    said, status = ended_by(number, what, run, tmp_path, lambda: faults.hits > 0)
    assert (said, status != 0) == (b"signal\n", True)
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.every_set
@pytest.mark.parametrize(
    ("what", "asked"),
    [
        ("attach", ""),
        ("attach", "/rank-"),
        *(pytest.param(what, "/rank-", marks=pytest.mark.long) for what in ("verify", "load", "export")),
    ],
)
def test_a_signal_ends_a_request_that_is_not_answered(
    what: str,
    asked: str,
    in_environment: None,
    bucket: str,
    proxy: Proxy,
    tmp_path: Path,
    runtime: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one of all, or the first one for a shard."""
    run, is_asked, is_over = f"s3://{bucket}/run", threading.Event(), threading.Event()
    save(run)
    until(lambda: not keepers_of(runtime), "the keeper to leave, with what it has in memory")

    def fault(request: Request) -> Fault:
        if request.method in ("GET", "HEAD") and asked in request.path:
            is_asked.set()
            is_over.wait()
        return ""

    proxy.fault = fault
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    try:
        said, status = ended_by(signal.SIGINT, what, run, tmp_path, is_asked.is_set)
    finally:
        is_over.set()
    assert (said, status != 0) == (b"signal\n", True)
    assert not (tmp_path / "out.safetensors").exists()


def save(run: str | Path) -> None:
    with flashckpt.attach(run, every=None, model=torch.nn.Linear(3584, 4096, bias=False)) as made:
        made.step()
        made.save()


def ended_by(
    number: signal.Signals, what: str, run: str | Path, folder: Path, is_reading: Callable[[], bool]
) -> tuple[bytes, int]:
    """Send a signal to the program once it reads what hangs; return its output and its exit status."""
    command = [sys.executable, "-c", _PROGRAM, what, os.fspath(run), str(int(number))]
    command.append(str(folder / "out.safetensors"))
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            until(is_reading, "a read")
            process.send_signal(number)
            said, _ = process.communicate(timeout=240)
            return said, process.returncode
        finally:
            process.kill()
