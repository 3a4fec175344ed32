"""Ceph's S3 server on loopback, as processes of the test.

Debian, Ubuntu: apt-get install --no-install-recommends ceph-mon ceph-osd ceph-common radosgw
"""

import os
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from tests.waiting import until

_PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
ACCESS_KEY, SECRET_KEY, REGION = "test", "testsecret", "us-east-1"
_GIB = 1 << 30
_TRIES = 8

_CONFIG = """[global]
fsid = {fsid}
mon host = [v1:127.0.0.1:{mon_port}/0]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
paxos propose interval = 0.05
mon data = {folder}/mon
mon data avail crit = 0
mon allow pool size one = true
osd data = {folder}/osd
osd objectstore = bluestore
bluestore block create = true
bluestore block size = {disk_bytes}
osd memory target = 1073741824
osd client watch timeout = 2
osd class update on start = false
osd crush update on start = false
osd crush chooseleaf type = 0
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pg autoscale mode = off
mon max pg per osd = 1000
ms crc data = false
run dir = {folder}/run
admin socket = {folder}/run/$name.asok
pid file = {folder}/run/$name.pid
log file = {folder}/log/$name.log
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw gc obj min wait = 1
rgw gc processor period = 1
"""


def missing() -> list[str]:
    """The programs that the server needs and that are not installed."""
    return [name for name in _PROGRAMS if shutil.which(name) is None]


class S3Server:
    """One node of Ceph with its gateway, which can be killed and started again."""

    def __init__(self, folder: Path, disk_bytes: int = 8 * _GIB) -> None:
        self._folder, self.port = folder, free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        fsid, osd = str(uuid.uuid4()), str(uuid.uuid4())
        for name in ("mon", "osd", "run", "log"):
            (folder / name).mkdir(parents=True)
        mon_port = free_port()
        config = _CONFIG.format(
            fsid=fsid, mon_port=mon_port, port=self.port, folder=folder, disk_bytes=disk_bytes
        )
        (folder / "ceph.conf").write_text(config)
        self._environment = {**os.environ, "CEPH_CONF": str(folder / "ceph.conf")}
        address = f"[v1:127.0.0.1:{mon_port}/0]"
        self._run("monmaptool", "--create", "--addv", "a", address, "--fsid", fsid, "monmap")
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", "monmap")
        self._start("ceph-mon", "-i", "a")
        number = self._first_answer("ceph", "osd", "new", osd).strip()
        self._run("ceph-osd", "-i", number, "--mkfs", "--osd-uuid", osd)
        place = "create-or-move", f"osd.{number}", "1.0", "root=default", "host=h"
        self._first_answer("ceph", "osd", "crush", *place)
        self._start("ceph-osd", "-i", number)
        self._run(
            "radosgw-admin", "user", "create", "--uid=test", "--display-name=test",
            f"--access-key={ACCESS_KEY}", f"--secret={SECRET_KEY}",
        )  # fmt: skip
        self.start()

    def start(self) -> None:
        self._start("radosgw", "-n", "client.rgw")
        until(self._answers, "an answer of the gateway")

    def kill(self) -> None:
        """Kill the gateway; open requests are cut."""
        self._end("radosgw")

    def admin(self, *arguments: str) -> str:
        """The output of `radosgw-admin`."""
        return self._run("radosgw-admin", *arguments)

    def close(self) -> None:
        for name in ("radosgw", "ceph-osd", "ceph-mon"):
            self._end(name)

    def options(self, **others: object) -> dict[str, object]:
        """Return the storage options that open a store of this server, with others beside or instead."""
        return {
            "endpoint": self.endpoint, "access_key_id": ACCESS_KEY, "secret_access_key": SECRET_KEY,
            "region": REGION, "allow_http": True, **others,
        }  # fmt: skip

    def _answers(self) -> bool:
        try:
            with urlopen(self.endpoint, timeout=5):
                return True
        except (URLError, OSError):
            return False

    def _end(self, name: str) -> None:
        if (process := self._processes.pop(name, None)) is not None:
            process.kill()
            process.wait()

    def _run(self, *command: str) -> str:
        done = self._ended(*command)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def _first_answer(self, *command: str) -> str:
        """On a busy machine, a monitor that has just started refuses valid requests for a moment."""
        for _ in range(_TRIES - 1):
            if (done := self._ended(*command)).returncode == 0:
                return done.stdout
            time.sleep(1)
        return self._run(*command)

    def _ended(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=240, cwd=self._folder, env=self._environment
        )

    def _start(self, *command: str) -> None:
        log = self._folder / "log" / f"{command[0]}.out"
        process = started([*command, "-f"], log, cwd=self._folder, env=self._environment)
        self._processes[command[0]] = process


def started(command: Sequence[str], log: Path, **how: Any) -> subprocess.Popen[bytes]:
    """Start a server, which ends with the process that made it."""
    with open(log, "ab") as out:
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, **how,
        )  # fmt: skip


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
