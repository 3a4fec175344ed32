"""The remote of a run, looked at before the run is claimed: what was written wrongly is refused, a server
that is away is not.

Owns that difference. To the remote nothing is written here but a small name that goes at once: the keeper
copies.
"""

from __future__ import annotations

import errno
import logging
import secrets
import threading
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from typing import Any

from flashckpt.errors import OptionError, RunError
from flashckpt.keeper.protocol import ELECTION_LOCK
from flashckpt.memory.region import is_region_name
from flashckpt.memory.runtime import RuntimeFolder, base_folder, identity_of, is_alive
from flashckpt.options import Environment, Keep, Options, Remote, RemoteCall
from flashckpt.store import are_apart, open_store, options_of
from flashckpt.store.base import Store
from flashckpt.tiers.nearest import RemoteRun, look, unanswered

log = logging.getLogger(__name__)

_PATIENCE_S = 30.0
# These stay as they are until somebody changes something; all else may be over in a minute, or in a night.
_PERMANENT = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENODEV, errno.ENAMETOOLONG, errno.ELOOP}
)


def remote_of(call: RemoteCall, url: str, keep: Keep, options: Options) -> Remote | None:
    """What was asked for of a remote, for the run at `url`. OptionError where it names no store, or the same
    place. Asks no server."""
    if call.path is None:
        return None
    given = options.remote_storage_options
    store = open_store(call.path, options.storage_options if given is None else given)
    if not are_apart(store.url, url):
        raise OptionError(
            f"remote={store.url!r}: the run itself is in {url}, and one is in the other. Nothing was started."
            " Name a place apart from it, on other storage."
        )
    known: Mapping[str, Any] = options_of(store.url)
    return Remote(
        url=store.url,
        every=call.every,
        keep=call.keep or keep,
        options=known,
        compress=options.remote_compress,
    )


def look_at(remote: Remote, local: Store, run_id: str) -> tuple[str, RemoteRun]:
    """Ask it, for a few seconds, what it has of the run that `local` holds under `run_id` (empty: none yet).
    Raises as `nearest.look`: OptionError or RunError for what the user has to change. One that does not
    answer is no error, if there is a run here: what it has nobody can tell then."""
    found: list[tuple[str, RemoteRun]] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            found.append(_look(open_store(remote.url, remote.options).brief(), local, run_id))
        except Exception as error:
            errors.append(error)

    # A thread of its own: a file server that is away is waited for without end.
    thread = threading.Thread(target=run, name="flashckpt-remote", daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
    if found:
        return found[0]
    error = errors[0] if errors else TimeoutError(f"nothing came for {_PATIENCE_S:.0f} s")
    if not isinstance(error, OSError):
        raise error
    why = str(error.strerror or error)
    if error.errno not in _PERMANENT:
        return run_id, unanswered(local, open_store(remote.url, remote.options), run_id, why)
    raise RunError(
        f"The remote {remote.url} cannot be used: {why}. Nothing was changed, and training has not begun. "
        "Correct `remote`, its credentials or its options, or leave it out.",
        path=remote.url,
    ) from error


def _in_memory(local: Store, run_id: str) -> bool:
    """Whether this node may have snapshots of the run in memory: a region, or a keeper that has one."""
    base = base_folder(Environment.read().runtime_folder)
    try:
        runtime = RuntimeFolder.open(base, identity_of(run_id, local.place()), create=False)
    except FileNotFoundError:
        return False
    with closing(runtime):
        return is_alive(runtime, ELECTION_LOCK) or any(map(is_region_name, runtime.names()))


def _look(store: Store, local: Store, run_id: str) -> tuple[str, RemoteRun]:
    found = look(local, store, run_id, partial(_in_memory, local, run_id))
    if store.capabilities.rename:  # a folder, where the check of a store asks nothing
        probe = f".probe-{secrets.token_hex(8)}"
        store.create(probe, b"")
        store.remove(probe)
    return found
