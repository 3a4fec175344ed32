"""Azurite, Microsoft's emulator of Azure's blob storage, on loopback and in its own memory.

npm install --global azurite
"""

import base64
import hashlib
import hmac
import os
import shutil
from email.utils import formatdate
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from tests.stores.s3_server import free_port, started
from tests.waiting import until

_PROGRAM = "azurite-blob"
# The well-known credentials of Azurite, published by Microsoft.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def missing() -> list[str]:
    """The programs that it needs and that are not installed."""
    return [name for name in ("node", _PROGRAM) if shutil.which(name) is None]


class AzureServer:
    """It ends at the latest with the process that made it."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}/{ACCOUNT}"
        command = [
            shutil.which(_PROGRAM) or "", "--inMemoryPersistence", "--disableTelemetry", "--silent",
            "--skipApiVersionCheck", "--blobHost", "127.0.0.1", "--blobPort", str(self.port),
        ]  # fmt: skip
        environment = {**os.environ, "AZURITE_TELEMETRY": "false"}
        self._process = started(command, folder / "log", cwd=folder, env=environment)
        until(self._answers, "an answer of Azurite")

    def make_container(self, name: str) -> None:
        about = f"x-ms-date:{formatdate(usegmt=True)}\nx-ms-version:2021-12-02"
        text = f"PUT{12 * chr(10)}{about}\n/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
        signed = base64.b64encode(hmac.digest(base64.b64decode(KEY), text.encode(), hashlib.sha256)).decode()
        headers = dict(line.split(":", 1) for line in about.split("\n"))
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{signed}"
        request = Request(f"{self.endpoint}/{name}?restype=container", method="PUT", headers=headers)
        with urlopen(request, timeout=60) as answer:
            assert answer.status == 201

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def options(self) -> dict[str, object]:
        """The options of a store on it."""
        return {"endpoint": self.endpoint, "account_name": ACCOUNT, "account_key": KEY, "allow_http": True}

    def _answers(self) -> bool:
        assert self._process.poll() is None, "Azurite has ended"
        try:
            with urlopen(self.endpoint, timeout=5):
                return True
        except HTTPError:
            return True
        except OSError:
            return False
