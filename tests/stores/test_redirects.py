"""A server that redirects: no request reaches another host, and no redirected request counts as done."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from flashckpt.store import obstore_client
from flashckpt.store.obstore_client import ObstoreClient

_METHODS = ("GET", "HEAD", "PUT", "POST", "DELETE")


@contextmanager
def served(address: str, answer: Callable[[Any], None]) -> Iterator[str]:
    """A server that gives each request to `answer`; its URL."""

    def asked(handler: Any) -> None:
        handler.rfile.read(int(handler.headers.get("content-length") or 0))
        answer(handler)

    made = {f"do_{name}": asked for name in _METHODS} | {"log_message": lambda *_: None}
    with ThreadingHTTPServer((address, 0), type("Handler", (BaseHTTPRequestHandler,), made)) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://{address}:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture
def other_host() -> Iterator[tuple[str, list[str]]]:
    """A server on another address that answers everything, and the requests that it got."""
    asked: list[str] = []

    def answer(handler: Any) -> None:
        asked.append(f"{handler.command} {handler.path}")
        handler.send_response(200)
        headers = {"content-length": "2", "etag": '"x"', "last-modified": "Wed, 21 Oct 2015 07:28:00 GMT"}
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(b"{}")

    with served("127.0.0.2", answer) as url:
        yield url, asked


def redirecting(code: int, target: str) -> Callable[[Any], None]:
    def answer(handler: Any) -> None:
        handler.send_response(code)
        handler.send_header("location", f"{target}/latest/meta-data{handler.path}")
        handler.send_header("content-length", "0")
        handler.end_headers()

    return answer


@pytest.mark.parametrize("code", [302, 307])
def test_no_request_is_redirected_to_another_host(
    code: int, other_host: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(obstore_client, "_BRIEF_DEADLINE_S", 0.2)
    target, asked = other_host
    with served("127.0.0.1", redirecting(code, target)) as endpoint:
        keys = {"access_key_id": "key", "secret_access_key": "secret", "session_token": "token"}
        client = ObstoreClient("s3://bucket/run", {"endpoint": endpoint, "region": "r", **keys}).brief()
        for request in (
            lambda: client.put("name", memoryview(b"data"), is_new=True),
            lambda: client.put("name", memoryview(b"data")),
            lambda: client.get("name", 100),
            lambda: client.size("name"),
            lambda: client.list(""),
            lambda: client.delete(["name"]),
        ):
            with pytest.raises(PermissionError, match="redirects requests"):
                request()
    assert asked == []


def test_the_users_own_proxy_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint, keys = "http://storage.example:9000", {"access_key_id": "key"}
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "AWS_ACCESS_KEY_ID"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    assert obstore_client._one_host(endpoint, keys)["proxy_excludes"] == "storage.example"
    assert not obstore_client._one_host(endpoint, {}), "credentials may come from the machine's role"
    assert not obstore_client._one_host(endpoint, {**keys, "proxy_url": "http://proxy.example"})
    assert not obstore_client._one_host(endpoint, {**keys, "proxy_excludes": "other.example"})
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example")
    confined = obstore_client._one_host(endpoint, keys)
    assert confined["proxy_excludes"] == "storage.example", "it is reached without that proxy"
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example")
    assert not obstore_client._one_host(endpoint, keys)
    monkeypatch.setenv("NO_PROXY", "storage.example")
    assert obstore_client._one_host(endpoint, keys)["proxy_excludes"] == "storage.example"
