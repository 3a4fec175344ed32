"""Requests to s3://, gs:// and az:// through obstore.

Owns the options, retries and timeouts of requests, and the translation of errors. Knows no file name of a run
and no images.
"""

from __future__ import annotations

import builtins
import errno
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass

from flashckpt.errors import OptionError
from flashckpt.printable import cause, escaped, redacted
from flashckpt.store.base import Entry
from flashckpt.threads import interruptible

# Retry policy of each request, also of each part of an upload.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _DEADLINE_S = 0.1, 5.0, 60.0
_BRIEF_PAUSE_S, _BRIEF_DEADLINE_S = 0.5, 5.0
_CONNECT_S = 30.0
# Read timeout. The client also counts it while it sends a request's body, so uploads do not use it.
_READ_TIMEOUT_S = 60.0

_CONCURRENCY = 8
_SMALL = 1 << 20
# Enough for concurrent parts of 16 MiB on a line of 100 kB/s.
_UPLOAD_S = _CONCURRENCY * (16 << 20) / 100e3
# On a faster line: this multiple of the measured time of a part, with a lower bound.
_SLOWER, _LEAST_UPLOAD_S = 20.0, 120.0
_CONFLICT_PAUSES_S = (0.1, 0.5, 2.0)


class ObstoreClient:
    """See ObjectClient in objects.py.

    `options`: keyword arguments of obstore for this kind of store (`endpoint`, `region`, `access_key_id` …)
    and of its HTTP client (`allow_http` …). obstore takes the rest from the environment, under the names that
    the clouds' own tools use. Raises OptionError for invalid options, before any request.
    """

    is_read_only = False

    def __init__(self, url: str, options: Mapping[str, Any] | None = None, *, is_brief: bool = False) -> None:
        self.url, self._is_brief = url.rstrip("/"), is_brief
        self._brief: ObstoreClient | None = None
        self._obstore, self._has_bucket = _obstore(url), False
        self.renew(options or {})

    def renew(self, options: Mapping[str, Any]) -> None:
        before = getattr(self, "_options", {})
        self._options, tries = dict(options), (_DEADLINE_S, _LONGEST_PAUSE_S)
        try:
            if self._is_brief:
                store = uploads = self._open(_BRIEF_DEADLINE_S, _BRIEF_PAUSE_S, timeout=_BRIEF_DEADLINE_S)
            else:
                store = self._open(*tries, timeout=_UPLOAD_S, read_timeout=_READ_TIMEOUT_S)
                uploads = self._open(*tries, timeout=_UPLOAD_S)
        except OptionError:
            self._options = before
            raise
        self._store, self._uploads, self._upload_s = store, uploads, _UPLOAD_S
        if self._brief is not None:
            self._brief.renew(options)

    def brief(self) -> ObstoreClient:
        self._brief = self._brief or ObstoreClient(self.url, self._options, is_brief=True)
        return self._brief

    @property
    def server(self) -> str:
        account = self._options.get("account_name") or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "")
        return f"{_endpoint(self.url, self._options)} {account if self.url.startswith('az:') else ''}".strip()

    def put(self, key: str, data: memoryview, *, is_new: bool = False) -> bool:
        how = {"use_multipart": False, "mode": "create" if is_new else "overwrite"}
        store = self._store if len(data) <= _SMALL else self._uploads
        for pause_s in (*_CONFLICT_PAUSES_S, None):
            with _translated(key, self.url, writes=True):
                try:
                    self._obstore.put(store, key, data, **how)
                except self._obstore.exceptions.AlreadyExistsError as error:
                    # S3: another creation was under way, and neither may exist now.
                    if "ConditionalRequestConflict" not in str(error):
                        return False
                    if pause_s is None:
                        raise OSError(errno.EREMOTEIO, "other creations of it are under way", key) from error
                    time.sleep(pause_s)
                    continue
                self._has_bucket = True
                return True
        raise AssertionError("unreachable: the last try returns or raises")

    def upload(self, key: str, parts: Iterable[memoryview], part_bytes: int) -> None:
        how: dict[str, Any] = {
            "use_multipart": True,
            "chunk_size": part_bytes,
            "max_concurrency": _CONCURRENCY,
        }
        began_s, sizes = time.monotonic(), list[int]()

        def counted() -> Iterator[memoryview]:
            for part in parts:
                sizes.append(len(part))
                yield part

        try:
            with _translated(key, self.url, writes=True):
                self._obstore.put(self._uploads, key, counted(), **how)
        except BaseException:
            # The line may have become slower: give the next try the longest time.
            self._limit_uploads(_UPLOAD_S)
            raise
        part_s = (time.monotonic() - began_s) * min(1.0, _CONCURRENCY / max(1, len(sizes)))
        self._limit_uploads(min(max(_SLOWER * part_s, _LEAST_UPLOAD_S), _UPLOAD_S))

    def _limit_uploads(self, limit_s: float) -> None:
        """Limit the time for each part: no read timeout applies while sending, so a vanished server would go
        unnoticed."""
        if not self._upload_s / 2 <= limit_s <= self._upload_s * 2:
            self._uploads = self._open(_DEADLINE_S, _LONGEST_PAUSE_S, timeout=limit_s)
            self._upload_s = limit_s

    @interruptible
    def get(self, key: str, max_bytes: int) -> memoryview | int:
        with _translated(key, self.url):
            found = self._obstore.get(self._store, key)
            size: int = found.meta["size"]
            self._has_bucket = True
            return size if size > max_bytes else memoryview(found.bytes())

    def get_range(self, key: str, start: int, stop: int) -> memoryview:
        with _translated(key, self.url):
            return memoryview(self._obstore.get_range(self._store, key, start=start, end=stop))

    @interruptible
    def size(self, key: str) -> int:
        try:
            with _translated(key, self.url):
                size: int = self._obstore.head(self._store, key)["size"]
                return size
        except FileNotFoundError:
            # HEAD has no error text, so the bucket itself may be missing.
            if not self._has_bucket:
                self.list(f"{key}/")
                self._has_bucket = True
            raise

    @interruptible
    def list(self, prefix: str) -> builtins.list[Entry]:
        with _translated(prefix, self.url):
            found = self._obstore.list_with_delimiter(self._store, prefix or None)
        folders = [Entry(_last(path), True, 0) for path in found["common_prefixes"]]
        files = [
            Entry(_last(each["path"]), False, each["size"], each["last_modified"].timestamp())
            for each in found["objects"]
        ]
        return folders + files

    def delete(self, keys: builtins.list[str]) -> None:
        with _translated(keys[0] if keys else "", self.url):
            try:
                self._obstore.delete(self._store, keys)
            except FileNotFoundError:
                # Some servers report a missing object. Others in the batch may remain: delete one by one.
                for key in keys if len(keys) > 1 else ():
                    self.delete([key])

    def _open(self, deadline_s: float, longest_pause_s: float, **limits_s: float) -> Any:
        client = {name: self._options[name] for name in self._options if name in _CLIENT_OPTIONS}
        own = {name: value for name, value in self._options.items() if name not in client}
        endpoint = _checked_endpoint(self.url, self._options)
        retries = {
            "max_retries": 1_000_000,  # the deadline ends them
            "retry_timeout": timedelta(seconds=deadline_s),
            "backoff": {
                "init_backoff": timedelta(seconds=_FIRST_PAUSE_S),
                "max_backoff": timedelta(seconds=longest_pause_s),
                "base": 2,
            },
        }
        try:
            return self._obstore.store.from_url(
                self.url,
                client_options={
                    "connect_timeout": timedelta(seconds=_CONNECT_S),
                    **{name: timedelta(seconds=limit) for name, limit in limits_s.items()},
                    # An endpoint without TLS is an explicit choice.
                    "allow_http": endpoint.startswith("http://"),
                    **(_one_host(endpoint, self._options) if self.url.startswith("s3:") else {}),
                    **client,
                },
                retry_config=retries,
                # Signing payloads costs 3 s of CPU per GiB. Shards have checksums, and TLS protects the rest.
                **({"unsigned_payload": True} if self.url.startswith("s3:") else {}),
                **own,
            )
        except Exception as error:
            raise OptionError(
                f"{self.url} cannot be used: {redacted(_first_line(error), self._options)}. Nothing was "
                "changed. Check the URL and its options."
            ) from cause(error, self._options)


_CLIENT_OPTIONS = frozenset(
    {
        "allow_http", "allow_invalid_certificates", "connect_timeout", "default_headers", "http1_only",
        "http2_only", "pool_idle_timeout", "pool_max_idle_per_host", "proxy_url", "proxy_ca_certificate",
        "proxy_excludes", "randomize_addresses", "read_timeout", "root_certificate", "timeout", "user_agent",
    }
)  # fmt: skip

# In obstore's order of precedence.
ENDPOINTS = (
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT",
    "AZURE_STORAGE_ENDPOINT",
    "AZURE_ENDPOINT",
)
# An HTTP proxy on a port that cannot be bound: requests through it fail.
_DEAD_PROXY = "127.0.0.1:0"

_MEANINGS = {
    "AccessDenied": "these credentials may not do that",
    "InvalidAccessKeyId": "the server does not know this access key",
    "SignatureDoesNotMatch": "the secret key does not belong to this access key",
    "RequestTimeTooSkewed": "this machine's clock differs from the server's",
    "ExpiredToken": "these credentials have expired",
    "QuotaExceeded": "the quota of the bucket or its owner is exhausted",
}


def _obstore(url: str) -> Any:
    try:
        import obstore
        import obstore.store
    except ImportError as error:
        raise OptionError(
            f"{url}: object storage needs the package obstore, which is not installed. Nothing was changed. "
            "Install it: pip install 'flashckpt[object]'."
        ) from error
    return obstore


def _endpoint(url: str, options: Mapping[str, Any]) -> str:
    """The server's URL from options or environment; empty if neither has one."""
    cloud = "AZURE" if url.startswith("az:") else "AWS"
    names = [name for name in ENDPOINTS if name.startswith(cloud)] if not url.startswith("gs:") else []
    from_options = (value for name, value in options.items() if _plain_name(name) in _ENDPOINT_OPTIONS)
    named = next(filter(None, from_options), None) or next(filter(None, map(os.environ.get, names)), "")
    return str(named).rstrip("/")


_ENDPOINT_OPTIONS = {"endpoint", "endpoint_url", "endpoint_url_s3"}


def _plain_name(option: str) -> str:
    """Remove the optional prefix of an obstore option's name."""
    return re.sub("^(aws|azure)_(storage_)?", "", option.lower())


def _checked_endpoint(url: str, options: Mapping[str, Any]) -> str:
    """Return the endpoint. Raises OptionError unless it is a plain URL: it appears in errors and in the run's
    name on a node."""
    endpoint = _endpoint(url, options)
    if re.search(r"[@?#]", endpoint):
        raise OptionError(
            f"{url} cannot be used: the endpoint has a user, a password, a query or a fragment in it, which "
            "would appear in errors and logs. Nothing was changed. Give credentials as storage_options "
            "(access_key_id, secret_access_key) or in the environment."
        )
    if endpoint and not re.fullmatch(r"https?://[\w.:\[\]-]+(/[^\s\x00-\x1f]*)?", endpoint, re.IGNORECASE):
        raise OptionError(
            f"{url} cannot be used: the endpoint {endpoint!r} is not a server's URL. Nothing was changed. "
            "Write it as in https://storage.example:9000."
        )
    return endpoint


def _one_host(endpoint: str, options: Mapping[str, Any]) -> dict[str, str]:
    """Return options that restrict the HTTP client to this server's host.

    obstore's client follows redirects to any host, also to a machine's metadata service, and sends the
    session token; this cannot be disabled. So requests to all other hosts are routed to a dead proxy. Return
    no options if the server is reached through a proxy or if credentials come from another host.
    """
    names = {_plain_name(name) for name in options}
    has_keys = not names.isdisjoint({"access_key_id", "skip_signature"}) or "AWS_ACCESS_KEY_ID" in os.environ
    server = urlsplit(endpoint)
    host = server.hostname
    if not host or not has_keys or not names.isdisjoint({"proxy_url", "proxy_excludes"}):
        return {}
    proxies = getproxies_environment()
    if {server.scheme, "all"} & {*proxies} and not proxy_bypass(host, proxies):
        return {}
    return {"proxy_url": f"http://{_DEAD_PROXY}", "proxy_excludes": host}


_used_in = 0
"""The process that sent the first request: the client's threads, which it has started, are in no other."""


@contextmanager
def _translated(key: str, url: str, *, writes: bool = False) -> Iterator[None]:
    """Translate obstore's errors into those of ObjectClient. OSError in a forked child, where a request would
    never end."""
    global _used_in
    _used_in = _used_in or os.getpid()
    if _used_in != os.getpid():
        why = (
            f"process {os.getpid()} was forked from one that has used object storage, and cannot use it: the "
            'threads of its client are not there. Nothing was read or changed. Start it by "spawn" or '
            '"forkserver" (multiprocessing.get_context, DataLoader(multiprocessing_context="spawn"))'
        )
        raise OSError(errno.EREMOTEIO, why, key)
    try:
        yield
    except Exception as error:
        is_missing = isinstance(error, FileNotFoundError)
        if "NoSuchUpload" in str(error):
            raise OSError(
                errno.EREMOTEIO,
                "another process or a rule of the bucket aborted the upload, so no object was written "
                "(NoSuchUpload)",
                key,
            ) from cause(error)
        if re.search("NoSuchBucket|ContainerNotFound|bucket does not exist", str(error)) or (
            is_missing and writes
        ):
            raise OSError(errno.ENODEV, f"the bucket of {url} does not exist", key) from cause(error)
        if is_missing:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key) from cause(error)
        if isinstance(error, OSError):
            raise
        raise _as_os_error(error, key) from cause(error)


def _as_os_error(error: Exception, key: str) -> OSError:
    kind, text = type(error).__name__, str(error)
    status = re.search(r"status code: (\d{3})", text)
    code = status[1] if status else ""
    if code.startswith("3") or _DEAD_PROXY in text:
        why = "the server redirects requests to another host, which is refused: name that host as endpoint"
        return PermissionError(errno.EACCES, why, key)
    if code == "507" or re.search("QuotaExceeded|InsufficientCapacity|EntityTooLarge", text):
        return OSError(errno.ENOSPC, _first_line(error), key)
    is_refused = kind in ("PermissionDeniedError", "UnauthenticatedError") or code in ("401", "403")
    # A batch of deletions succeeds as a whole and has an answer for each object.
    if is_refused or "(code: AccessDenied)" in text:
        return PermissionError(errno.EACCES, _first_line(error), key)
    return OSError(errno.EREMOTEIO, _first_line(error), key)


def _first_line(error: Exception) -> str:
    """The first line of obstore's text and the server's error code; the rest is debug output."""
    text = str(error)
    if "http://169.254.169.254/" in text:  # the metadata service, which has the machine's role
        return "no credentials were found, neither in the options, the environment nor this machine's role"
    code = re.search(r"<Code>(\w+)</Code>|\(code: (\w+)\)", text)
    name = (code[1] or code[2]) if code else ""
    if name in _MEANINGS:
        return f"{_MEANINGS[name]} ({name})"
    first = text.partition("\n")[0].partition("<?xml")[0].strip().rstrip(":")
    return escaped(redacted(f"{first} ({name})" if name else first))


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
