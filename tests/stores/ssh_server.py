"""A real OpenSSH server on loopback with its own keys. It uses no files of this machine's users.

Debian, Ubuntu: apt-get install --no-install-recommends openssh-server
"""

import getpass
import importlib.util
import os
import shutil
import socket
import subprocess
from pathlib import Path

from tests.stores.s3_server import free_port, started
from tests.waiting import until

_CONFIG = """Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
LogLevel ERROR
Subsystem sftp internal-sftp
"""


def missing() -> list[str]:
    """The programs that server and client need and that are not installed."""
    found = [name for name in ("sshd", "ssh-keygen") if _program(name) is None]
    return found + [name for name in ("fsspec", "paramiko") if importlib.util.find_spec(name) is None]


class SshServer:
    """It ends at the latest with the process that made it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = free_port()
        for name in ("host", "user"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(command, check=True, timeout=60)
        (folder / "config").write_text(_CONFIG.format(port=self.port, folder=folder))
        if os.geteuid() == 0:
            os.makedirs("/run/sshd", mode=0o755, exist_ok=True)
        command = [_program("sshd") or "", "-D", "-e", "-f", str(folder / "config")]
        self._process = started(command, folder / "log")
        until(self._answers, "an answer of sshd")

    def kill_connections(self) -> None:
        """Cut the open connections; serve new ones."""
        for line in Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split():
            os.kill(int(line), 9)

    def close(self) -> None:
        self.kill_connections()
        self._process.kill()
        self._process.wait()

    def options(self) -> dict[str, object]:
        """The options of a store on it."""
        return {
            "username": getpass.getuser(), "key_filename": str(self._folder / "user"),
            "look_for_keys": False, "allow_agent": False,
        }  # fmt: skip

    def url(self, folder: Path) -> str:
        return f"sftp://127.0.0.1:{self.port}{folder}"

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
                return connection.recv(3) == b"SSH"
        except OSError:
            return False


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/bin")
