"""Stores of small files and shards behind one narrow Protocol. Owns which store a path or URL means."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit
from weakref import WeakSet

from flashckpt.errors import OptionError
from flashckpt.options import storage_options, user_path
from flashckpt.printable import redacted
from flashckpt.store.base import Store
from flashckpt.store.local import LocalStore
from flashckpt.store.objects import OPTION, ObjectClient, ObjectStore, UploadRate

ENTRY_POINTS = "flashckpt.stores"
"""Group of entry points by which a package adds a store: the name is the URL's scheme, the value a callable
that takes the URL. Trainer, keeper and shell each look it up. The package must import without torch."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
# A scheme that has lost a slash, as in a `pathlib.Path`, or has a blank before it.
_ALMOST_URL = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]+:/")
_BUCKETS = ("s3", "gs", "az")

# Options of each URL's client in this process.
_options: dict[str, dict[str, Any]] = {}
_rates: dict[tuple[str, Any], UploadRate] = {}
# Clients in use, by URL.
_clients: defaultdict[str, WeakSet[ObjectClient]] = defaultdict(WeakSet)


def open_store(url_or_path: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> Store:
    """Open the store that a run's path or URL names. Create and read nothing. A path may begin with `~`, see
    `user_path`.

    `options`: options of an object store's client, see `Options.storage_options`. They hold for later calls
    in this process for the same URL without options. Without any, the environment variable
    FLASHCKPT_STORAGE_OPTIONS counts, a JSON object.

    Raises OptionError, which names the scheme, if neither this library nor an installed package has it; for
    invalid options; for a path with $NAME in it; and, without showing the URL, for a URL with a password in
    it.
    """
    text = os.fspath(url_or_path) if isinstance(url_or_path, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise OptionError(f"the run's path is {url_or_path!r}. Nothing was changed. Name a folder, as text.")
    match = _SCHEME.match(text)
    if match is None:
        if not text:
            raise OptionError("the run's path is empty. Nothing was changed. Name a folder.")
        if _ALMOST_URL.match(text):
            raise OptionError(
                f"{redacted(text)!r} is not a URL but looks like one: it would name a folder of this "
                "machine. Nothing was changed. Write scheme://… as text (a pathlib.Path removes a slash), or "
                "./… for a folder of such a name."
            )
        try:
            return LocalStore(user_path(text))
        except FileNotFoundError as error:
            raise OptionError(
                f"{text!r} is a relative path, and the working directory was deleted. Nothing was changed. "
                "Name the run by an absolute path, or start in a folder that exists."
            ) from error
    if match[1].lower() != "file":
        url = _canonical(text)
        before = _options.get(url)
        if options:
            give_options(url, options)
        try:
            return _store_at(url, match[1].lower())
        except OptionError:
            _options.pop(url, None)
            if before is not None:
                _options[url] = before
            raise
    parts = urlsplit(text)
    if re.search(r"[?#\x00-\x1f]", text):
        raise OptionError(
            f"{redacted(text)!r} is not a URL of a file: one of its characters must be written as %XX. "
            "Nothing was changed. Name the folder, or write the result of `pathlib.Path.as_uri()`."
        )
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise OptionError(
            f"{redacted(text)!r} names a file on another machine. Nothing was changed. Write file:///absolute/path."
        )
    return LocalStore(unquote(parts.path))


def give_options(url: str, options: Mapping[str, Any]) -> None:
    """Set the options of all stores of this URL (`Store.url`) in this process. Open stores use them from now
    on, since credentials may have been replaced. Raises OptionError for invalid options."""
    if options != _options.get(url):
        for client in [*_clients.get(url, ())]:
            client.renew(_without_rate(options))
        _options[url] = dict(options)


def options_of(url: str) -> dict[str, Any]:
    """The options of stores of this URL (`Store.url`)."""
    return _options.get(url) or storage_options()


def are_apart(one: str, other: str) -> bool:
    """Whether two runs, each given as `Store.url`, are in different places, neither inside the other."""
    places = (each if "://" in each else os.path.realpath(each) for each in (one, other))
    one, other = (os.path.join(place, "") for place in places)
    return not (one.startswith(other) or other.startswith(one))


def _canonical(url: str) -> str:
    """Return the canonical form of a URL, by which a node finds the run's keeper and memory. Raises
    OptionError, without any part that may be secret, for a URL that some client takes for another run's."""
    scheme, _, rest = url.partition("://")
    scheme, rest = scheme.lower(), rest.rstrip("/")
    if "@" in rest.partition("/")[0]:
        raise OptionError(
            f"a URL of {scheme}:// has a user or a password in it, which would appear in logs. Nothing was "
            "changed. Leave them out, and give them in the environment or as storage_options."
        )
    if scheme in _BUCKETS and ":" in rest.partition("/")[0]:
        raise OptionError(
            f"a URL of {scheme}:// has a port in it: clients would drop it, and two runs would be one. "
            f"Nothing was changed. Write {scheme}://BUCKET/run, and name the server by the option endpoint."
        )
    if re.search(r"[?#%\x00-\x1f]|\s$", rest) or not {"", ".", ".."}.isdisjoint(rest.split("/")[1:]):
        raise OptionError(
            f"a URL of {scheme}:// has a query, a fragment, %XX, a blank at its end, or a part that is "
            "empty, . or .. in it: clients would drop it, and two runs would be one. Nothing was changed. "
            "Name the run with plain characters. Give a signature or a token in the environment or as "
            "storage_options."
        )
    return f"{scheme}://{rest}"


def _without_rate(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != OPTION}


def _store_at(url: str, scheme: str) -> Store:
    # Late imports: most runs are folders.
    client: ObjectClient
    options = options_of(url)
    if scheme in _BUCKETS:
        from flashckpt.store.obstore_client import ObstoreClient

        client = ObstoreClient(url, _without_rate(options))
    else:
        from importlib.metadata import entry_points

        for each in entry_points(group=ENTRY_POINTS, name=scheme):
            factory: Callable[[str], Store] = each.load()
            return factory(url)
        from flashckpt.store.fsspec_client import FsspecClient

        client = FsspecClient(url, _without_rate(options))
    _clients[client.url].add(client)
    ceiling = options.get(OPTION, 0)
    # All stores of a URL with the same limit share it.
    if (url, ceiling) not in _rates:
        _rates[url, ceiling] = UploadRate(ceiling)
    return ObjectStore(client, _rates[url, ceiling])
