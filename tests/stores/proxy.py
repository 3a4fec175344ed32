"""A proxy before a server, which injects faults of a test on real sockets."""

import http.client
import re
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit


class Answer(NamedTuple):
    """The answer to a request that is not forwarded."""

    status: int
    headers: Mapping[str, str] = {}
    body: bytes = b""


Fault = Literal["", "lose answer", "refuse", "conflict", "cut", "overwrite", "spoil", "hide"] | Answer
"""Of one request: "lose answer" forwards it and closes the connection; "refuse" answers 503 and forwards
nothing; "conflict" does the same with the 409 of S3 while another creation is under way; "cut" closes the
connection and forwards nothing; "overwrite" says that what exists was created, as a server that ignores the
condition does; "spoil" answers with one bit of the body turned over; "hide" lists no object, as one does that
has not noticed its creation yet."""
_ANSWERS: dict[str, Answer] = {
    "refuse": Answer(503, body=b"<Error><Code>SlowDown</Code></Error>"),
    "conflict": Answer(409, body=b"<Error><Code>ConditionalRequestConflict</Code></Error>"),
}

_NOT_FORWARDED = {"transfer-encoding", "connection", "content-length"}


@dataclass
class Request:
    method: str
    path: str
    num_bytes: int = 0
    status: int = 0
    headers: frozenset[str] = frozenset()


class _Server(ThreadingHTTPServer):
    def handle_error(self, *about: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client was killed, or gave up
            super().handle_error(*about)


@dataclass
class Proxy:
    """`fault` is called for each request, from several threads."""

    target: str = ""
    fault: Callable[[Request], Fault] = lambda request: ""
    requests: list[Request] = field(default_factory=list)
    address: str = "127.0.0.1"

    def __enter__(self) -> "Proxy":
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = _Server((self.address, 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def endpoint(self) -> str:
        return f"http://{self.address}:{self._server.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    owner: Proxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = Request(
            self.command, self.path, len(body), headers=frozenset(name.lower() for name in self.headers)
        )
        self.owner.requests.append(request)
        fault = self.owner.fault(request)
        answer = fault if isinstance(fault, Answer) else _ANSWERS.get(fault)
        if answer is not None:
            request.status = answer.status
            self._answer(*answer)
            return
        if fault != "cut":
            try:
                status, headers, data = self._ask(body)
            except (OSError, http.client.HTTPException):
                # The server is absent, and so is the proxy.
                self.close_connection = True
                return
            if fault == "overwrite" and status == 412:
                status, headers, data = 200, {"ETag": '"0"'}, b""
            if fault == "hide":
                data = re.sub(rb"<Contents>.*?</Contents>", b"", data, flags=re.DOTALL)
            if fault == "spoil":
                middle = len(data) // 2
                data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
            request.status = status
            if fault != "lose answer":
                self._answer(status, headers, data)
                return
        self.close_connection = True

    def _ask(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        server = urlsplit(self.owner.target)
        assert server.hostname is not None
        connection = http.client.HTTPConnection(server.hostname, server.port, timeout=240)
        try:
            # Keep the Host header, which the client has signed.
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            headers = {
                name: value for name, value in answer.getheaders() if name.lower() not in _NOT_FORWARDED
            }
            length = answer.getheader("Content-Length")
            data = answer.read()
            if self.command == "HEAD" and length is not None:
                headers["Content-Length"] = length
            return answer.status, headers, data
        finally:
            connection.close()

    def _answer(self, status: int, headers: Mapping[str, str], data: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(data)))
        with suppress(ConnectionError):  # the client may have given up
            self.end_headers()
            if self.command != "HEAD":  # a body after such an answer would corrupt the next one
                self.wfile.write(data)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _forward

    def log_message(self, *_: Any) -> None:
        """No log: tests record requests themselves."""
