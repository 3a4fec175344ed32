"""The assets of a run: small files of the training program (a model's config, its tokenizer) that belong to
all of its steps. Owns `assets.json`, which holds all of them. It is written once, atomically.

Nothing here is loaded or run as code. Copies and remotes of a run have the same file.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from flashckpt.errors import DamagedError, OptionError
from flashckpt.format.checked_json import JsonRecord
from flashckpt.format.forms import Form, fields, items, pair, shown, text
from flashckpt.format.names import ASSETS
from flashckpt.store.base import Store, write_once

# A path of plain names: each asset can be written below any folder.
_NAME = re.compile(r"(?!\.)[A-Za-z0-9._ -]{1,200}(?:/(?!\.)[A-Za-z0-9._ -]{1,200}){0,3}")
MAX_BYTES, MAX_FILES = 128 << 20, 1000


def _of_base64(found: Any) -> bytes:
    try:
        return base64.b64decode(found, validate=True)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{shown(found)} is not base64") from error


_DATA: Form[bytes] = Form(lambda data: base64.b64encode(data).decode(), _of_base64)
_ROWS = items(pair(text(_NAME), _DATA), MAX_FILES)
_FILES: Form[Mapping[str, bytes]] = Form(
    lambda files: _ROWS.dump(tuple(files.items())), lambda found: dict(_ROWS.load(found))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assets(JsonRecord):
    """The file of the assets, by name."""

    KIND = "assets"
    MAX_BYTES = 2 * MAX_BYTES
    FORMS = fields(files=_FILES)
    files: Mapping[str, bytes] = field(repr=False)


def write_assets(store: Store, files: Mapping[str, bytes]) -> bool:
    """Keep these files in a run that has none yet. Returns whether they were written: a run keeps the first
    files that it is given. Durable when this returns.

    Raises OptionError for a name that is not a relative path of plain characters and for more than 128 MiB or
    1000 files in all; OSError.
    """
    for name in files:
        if _NAME.fullmatch(name) is None:
            raise OptionError(
                f"assets: {name!r} is not a relative path of letters, digits, '.', '_', '-' and spaces. No "
                "asset was written."
            )
    num_bytes = sum(map(len, files.values()))
    if num_bytes > MAX_BYTES or len(files) > MAX_FILES:
        raise OptionError(
            f"assets: {len(files)} files of {num_bytes} bytes; a run can keep at most {MAX_FILES} files "
            f"of {MAX_BYTES} bytes. No asset was written."
        )
    if not files or has_assets(store):
        return False
    with suppress(FileExistsError):
        write_once(store, ASSETS, Assets(files=files).to_bytes())
        return True
    return False


def has_assets(store: Store) -> bool:
    return store.exists(ASSETS)


def read_assets(store: Store) -> dict[str, bytes]:
    """The assets of a run by name, verified; empty where it has none. Raises DamagedError, FormatError,
    OSError."""
    try:
        data = store.read(ASSETS, Assets.MAX_BYTES)
    except FileNotFoundError:
        return {}
    return dict(Assets.from_bytes(data, ASSETS).files)


def copy_assets(source: Store, target: Store, *, repairs: bool = False) -> bool:
    """Give a copy of a run the assets of the run, where it has none; with `repairs` also where those that it
    has are damaged. Returns whether the source has any. Raises as `read_assets` does of the source: damaged
    assets are not copied."""
    try:
        data = source.read(ASSETS, Assets.MAX_BYTES)
    except FileNotFoundError:
        return False
    Assets.from_bytes(data, ASSETS)
    if not has_assets(target):
        target.create(ASSETS, data)
    elif repairs:
        try:
            read_assets(target)
        except DamagedError:
            target.replace(ASSETS, data)
    return True
