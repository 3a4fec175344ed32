"""Uploads to a bucket that were begun in parts and never ended: nobody sees them, and they are paid for.

obstore has no request for them, so they are asked for through botocore, where it is installed. Owns how the
same options and environment are given to it. Judges nothing: which of them are dead, its caller knows. On
gs:// and az:// nothing is asked: Azure lets go of such parts after a week by itself.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import unquote, urlsplit

from flashckpt.printable import cause, escaped, redacted
from flashckpt.store.base import Store
from flashckpt.store.compressed_file import plain_name
from flashckpt.store.compressed_store import below
from flashckpt.store.objects import ObjectStore
from flashckpt.store.obstore_client import ENDPOINTS, ObstoreClient

RULE = "a lifecycle rule of the bucket, AbortIncompleteMultipartUpload after 7 days, ends them"


class UploadsUnknownError(Exception):
    """Nobody can tell what was begun there. Says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Upload:
    """`path` is that of the file in the run, also where it was to stand compressed; `age_s` by the server's
    clock alone."""

    path: str
    age_s: float
    upload_id: str
    key: str


class UnfinishedUploads:
    """Those below a run."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        parts = urlsplit(url)
        self._bucket, self._prefix = parts.netloc, f"{unquote(parts.path).strip('/')}/".lstrip("/")
        self._client = _client(url, options)

    def list(self) -> list[Upload]:
        """UploadsUnknownError where the server does not say."""
        found = []
        with _told():
            for page in self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self._bucket, Prefix=self._prefix
            ):
                now = parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"])
                for each in page.get("Uploads", ()):
                    age_s = (now - each["Initiated"]).total_seconds()
                    path = each["Key"].removeprefix(self._prefix)
                    folder, separator, name = path.rpartition("/")
                    name, _ = plain_name(name) or (name, 0)
                    found.append(Upload(folder + separator + name, age_s, each["UploadId"], each["Key"]))
        return found

    def abort(self, upload: Upload) -> None:
        """Its parts go; one that has ended meanwhile is left as it is. OSError."""
        try:
            self._client.abort_multipart_upload(
                Bucket=self._bucket, Key=upload.key, UploadId=upload.upload_id
            )
        except self._client.exceptions.NoSuchUpload:
            pass
        except Exception as error:
            raise OSError(errno.EIO, escaped(redacted(str(error))), upload.path) from cause(error)


def unfinished_uploads(store: Store) -> UnfinishedUploads | None:
    """None where a store has no such thing. UploadsUnknownError where it has, and cannot be asked."""
    store = below(store)
    client = store.client if isinstance(store, ObjectStore) else None
    if not isinstance(client, ObstoreClient) or not store.url.lower().startswith("s3://"):
        return None
    with _told():
        return UnfinishedUploads(store.url, client.options)


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except ImportError:
        raise UploadsUnknownError(
            "Uploads that died in the middle are not looked for, since botocore is not installed (pip "
            f"install botocore); {RULE}, too."
        ) from None
    except Exception as error:
        why = escaped(redacted(str(error)))
        raise UploadsUnknownError(
            f"Uploads that died in the middle could not be looked for ({why}); {RULE}, too."
        ) from cause(error)


# What a user calls them, with and without "aws_", as obstore takes them.
_KEYS = {
    "aws_access_key_id": ("access_key_id",),
    "aws_secret_access_key": ("secret_access_key",),
    "aws_session_token": ("session_token", "token"),
    "region_name": ("region", "default_region"),
    "endpoint_url": ("endpoint", "endpoint_url"),
}


def _client(url: str, options: Mapping[str, Any]) -> Any:
    from botocore.config import Config
    from botocore.session import get_session

    plain = {name.lower().removeprefix("aws_"): value for name, value in options.items()}
    how = {
        key: next((plain[name] for name in names if plain.get(name)), None) for key, names in _KEYS.items()
    }
    get = os.environ.get
    how["region_name"] = how["region_name"] or get("AWS_REGION") or get("AWS_DEFAULT_REGION") or "us-east-1"
    how["endpoint_url"] = how["endpoint_url"] or next(filter(None, map(get, ENDPOINTS)), None)
    is_virtual = str(plain.get("virtual_hosted_style_request", "")).lower() in ("true", "1")
    proxy = plain.get("proxy_url")
    config = Config(
        s3={"addressing_style": "virtual" if is_virtual else "path"},
        proxies={"http": proxy, "https": proxy} if proxy else None,
        retries={"mode": "standard", "total_max_attempts": 5},
    )
    verify = not plain.get("allow_invalid_certificates", False)
    return get_session().create_client("s3", verify=verify and None, config=config, **how)
