"""A server that redirects: no request reaches another host, and no redirected request counts as done."""

import pytest

from flashckpt.store import obstore_client
from flashckpt.store.obstore_client import ObstoreClient
from tests.stores.proxy import Answer, Proxy


@pytest.mark.parametrize("code", [302, 307])
def test_no_request_is_redirected_to_another_host(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(obstore_client, "_BRIEF_DEADLINE_S", 0.2)
    done = Answer(200, {"etag": '"x"', "last-modified": "Wed, 21 Oct 2015 07:28:00 GMT"}, b"{}")
    with Proxy(fault=lambda request: done, address="127.0.0.2") as other, Proxy() as server:
        server.fault = lambda request: Answer(code, {"location": f"{other.endpoint}/meta-data{request.path}"})
        keys = {"access_key_id": "key", "secret_access_key": "secret", "session_token": "token"}
        client = ObstoreClient(
            "s3://bucket/run", {"endpoint": server.endpoint, "region": "r", **keys}
        ).brief()
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
    assert other.requests == []


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
