"""Where bytes rest: small files and shards behind one narrow Protocol. Owns which URL is what store."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit
from weakref import WeakSet

from flashckpt.errors import OptionError
from flashckpt.options import storage_options
from flashckpt.printable import redacted
from flashckpt.store import upload_rate
from flashckpt.store.base import Store
from flashckpt.store.compressed_store import CompressedStore
from flashckpt.store.local import LocalStore
from flashckpt.store.upload_rate import UploadRate

if TYPE_CHECKING:
    from flashckpt.store.objects import ObjectClient

_Client = TypeVar("_Client", bound="ObjectClient")

ENTRY_POINTS = "flashckpt.stores"
"""The group of entry points in which a package names a store: the URL's scheme, and a callable that takes the
URL. It is looked up in each process by itself: trainer, keeper and shell. It must import without torch."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
# One that has lost a slash, as in a `pathlib.Path`, or has a blank before it.
_NEARLY = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]+:/")
_BUCKETS = ("s3", "gs", "az")

# By URL, for this process: what its client was given beside the URL.
_given: dict[str, dict[str, Any]] = {}
_rates: dict[tuple[str, Any], UploadRate] = {}
# By URL: those that are in use.
_clients: defaultdict[str, WeakSet[ObjectClient]] = defaultdict(WeakSet)


def open_store(url_or_path: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> Store:
    """The store that a run's path or URL names. Nothing is created or read.

    `options` is what an object store's client takes beside the URL, see `Options.storage_options`. Those
    given for a URL hold for later calls of this process without any; where none were,
    FLASHCKPT_STORAGE_OPTIONS counts, a JSON object.

    OptionError for a scheme that neither this library nor an installed package has, which is named, for
    options that cannot be, and for a URL with a password in it, which is not.
    """
    text = os.fspath(url_or_path) if isinstance(url_or_path, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise OptionError(f"the run's path is {url_or_path!r}. Nothing was changed. Name a folder, as text.")
    return CompressedStore(_opened(text, options))


def _opened(text: str, options: Mapping[str, Any] | None) -> Store:
    match = _SCHEME.match(text)
    if match is None:
        if not text:
            raise OptionError("the run's path is empty. Nothing was changed. Name a folder.")
        if _NEARLY.match(text):
            raise OptionError(
                f"{redacted(text)!r} is no URL, and looks like one: it would be a folder of this machine. "
                "Nothing was changed. Write scheme://… as text (a pathlib.Path takes a slash away); a folder "
                "of such a name is ./…"
            )
        try:
            return LocalStore(text)
        except FileNotFoundError as error:
            raise OptionError(
                f"{text!r} is a relative path, and the working directory was deleted. Nothing was changed. "
                "Name the run by an absolute path, or start in a folder that is there."
            ) from error
    if match[1].lower() != "file":
        url = _one_form(text)
        if options:
            give_options(url, options)
        return _factory(url, match[1].lower())(url)
    parts = urlsplit(text)
    if re.search(r"[?#\x00-\x1f]", text):
        raise OptionError(
            f"{redacted(text)!r} is no URL of a file: one of its characters must be written as %XX. "
            "Nothing was changed. Name the folder, or write what `pathlib.Path.as_uri()` gives."
        )
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise OptionError(
            f"{redacted(text)!r} names a file on another machine. Nothing was changed. Write file:///absolute/path."
        )
    return LocalStore(unquote(parts.path))


def give_options(url: str, options: Mapping[str, Any]) -> None:
    """What stores of this URL, as a store gives it, are opened with from now on, in this process. Those that
    are open go on with it: credentials may have been replaced. OptionError for options that cannot be."""
    if options != _given.get(url):
        for client in [*_clients.get(url, ())]:
            client.renew({name: value for name, value in options.items() if name != upload_rate.OPTION})
        _given[url] = dict(options)


def options_of(url: str) -> dict[str, Any]:
    """What a store of this URL, as a store gives it, is opened with."""
    return _given.get(url) or storage_options()


def are_apart(one: str, other: str) -> bool:
    """Whether two runs, named as their stores do, are in places of which none is the other or in it."""
    places = (each if "://" in each else os.path.realpath(each) for each in (one, other))
    one, other = (os.path.join(place, "") for place in places)
    return not (one.startswith(other) or other.startswith(one))


def _one_form(url: str) -> str:
    """The one form of a URL that names a run: by it its keeper and its memory are found on a node.
    OptionError, which shows no part that may be secret, for one that some client would take for another's."""
    scheme, _, rest = url.partition("://")
    scheme, rest = scheme.lower(), rest.rstrip("/")
    if "@" in rest.partition("/")[0]:
        raise OptionError(
            f"a URL of {scheme}:// has a user or a password in it, which would stand in logs. Nothing was "
            "changed. Leave them out, and give them in the environment or as storage_options."
        )
    if scheme in _BUCKETS and ":" in rest.partition("/")[0]:
        raise OptionError(
            f"a URL of {scheme}:// has a port in it: clients would leave it out, and two runs be one. "
            f"Nothing was changed. Write {scheme}://BUCKET/run; the server is named by the option endpoint."
        )
    if re.search(r"[?#%\x00-\x1f]|\s$", rest) or not {"", ".", ".."}.isdisjoint(rest.split("/")[1:]):
        raise OptionError(
            f"a URL of {scheme}:// has a query, a fragment, %XX, a blank at its end, or a part that is "
            "empty, . or .. in it: clients would leave it out, and two runs be one. Nothing was changed. "
            "Name the run with plain characters; a signature or a token is given in the environment or as "
            "storage_options."
        )
    return f"{scheme}://{rest}"


def _client_options(url: str) -> dict[str, Any]:
    return {name: value for name, value in options_of(url).items() if name != upload_rate.OPTION}


def _rate_of(url: str) -> UploadRate:
    """One for all stores of a URL that were given the same ceiling."""
    ceiling = options_of(url).get(upload_rate.OPTION, 0)
    if (url, ceiling) not in _rates:
        _rates[url, ceiling] = UploadRate(ceiling)
    return _rates[url, ceiling]


def _known(client: _Client) -> _Client:
    _clients[client.url].add(client)
    return client


def _factory(url: str, scheme: str) -> Callable[[str], Store]:
    # Late, all of it: most runs are folders.
    if scheme in _BUCKETS:
        from flashckpt.store.objects import ObjectStore
        from flashckpt.store.obstore_client import ObstoreClient

        return lambda url: ObjectStore(_known(ObstoreClient(url, _client_options(url))), _rate_of(url))
    from importlib.metadata import entry_points

    for each in entry_points(group=ENTRY_POINTS, name=scheme):
        factory: Callable[[str], Store] = each.load()
        return factory
    from flashckpt.store.fsspec_client import FsspecClient
    from flashckpt.store.objects import ObjectStore

    client = _known(FsspecClient(url, _client_options(url)))
    return lambda url: ObjectStore(client, _rate_of(url))
