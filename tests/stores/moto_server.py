"""moto's S3 server on loopback, for machines without Ceph: it comes with the `test` extra, from PyPI.

Two processes. The backend holds the objects in its memory; the gateway passes bytes between its clients and
the backend, and can be killed and started again like a real one.

    python -m tests.stores.moto_server backend PORT
    python -m tests.stores.moto_server gateway PORT BACKEND_PORT
"""

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

from tests.stores.s3_server import ACCESS_KEY, REGION, SECRET_KEY, S3Server, free_port, started
from tests.waiting import until

_BLOCK_BYTES = 1 << 20


class MotoServer(S3Server):
    """Both processes end with the process that made them."""

    gateway = "gateway"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._backend_port = free_port()
        self._serve("backend", self._backend_port)
        until(lambda: self._answers(self._backend_port), "an answer of moto")
        self.start()

    def start(self) -> None:
        self._serve("gateway", self.port, self._backend_port)
        until(lambda: self._answers(self.port), "an answer of the gateway")

    def close(self) -> None:
        for name in ("gateway", "backend"):
            self._end(name)

    def _serve(self, name: str, *ports: int) -> None:
        command = [sys.executable, "-m", "tests.stores.moto_server", name, *map(str, ports)]
        environment = {
            **os.environ, "AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": REGION, "MOTO_S3_DEFAULT_MAX_KEYS": "1000",
        }  # fmt: skip
        log, root = self._folder / f"{name}.out", Path(__file__).parents[2]
        self._processes[name] = started(command, log, cwd=root, env=environment)


def _serialized(application: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    """Run one request at a time: moto checks a condition and writes the object in two steps."""
    lock = threading.Lock()

    def run(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        # Read the body first: a client that stops sending must not hold the lock.
        if not environ.get("wsgi.input_terminated"):
            body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        else:
            body = environ["wsgi.input"].read()
            environ["CONTENT_LENGTH"] = str(len(body))
        environ["wsgi.input"] = BytesIO(body)
        with lock:
            answer = application(environ, start_response)
            try:
                return list(answer)
            finally:
                if (close := getattr(answer, "close", None)) is not None:
                    close()

    return run


def _backend(port: int) -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, run_simple

    # Keep-alive, as real servers do.
    WSGIRequestHandler.protocol_version = "HTTP/1.1"
    application = _serialized(DomainDispatcherApplication(create_backend_app))
    run_simple("127.0.0.1", port, application, threaded=True)


async def _gateway(port: int, backend_port: int) -> None:
    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while block := await source.read(_BLOCK_BYTES):
                target.write(block)
                await target.drain()
        target.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_backend, to_backend = await asyncio.open_connection("127.0.0.1", backend_port)
        await asyncio.gather(copy(reader, to_backend), copy(from_backend, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    kind, *ports = sys.argv[1:]
    if kind == "backend":
        _backend(int(ports[0]))
    else:
        asyncio.run(_gateway(*map(int, ports)))
