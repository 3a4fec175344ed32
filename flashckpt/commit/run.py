"""What makes a folder a run. Owns run.json; never decides where a run goes on from."""

from __future__ import annotations

import secrets

from flashckpt.errors import DamagedError, NoSuchStepError, RunError, UnusableRunError
from flashckpt.format.names import ATTEMPTS, RUN, STEPS
from flashckpt.format.records import Run
from flashckpt.store.base import Store


def open_run(store: Store, create: bool) -> Run:
    """The run in a store; with `create`, for who will commit to it, a new one where there is none.

    NoSuchStepError where there is none and none is to be made, UnusableRunError where steps stand without
    their run.json, FormatError where it is written by a newer version, DamagedError where it is damaged,
    RunError for `create` where the storage overwrites.
    """
    if create and not store.capabilities.conditional_create:
        raise RunError(
            f"{store.url}: this storage overwrites a file that is to be created, so a commit there could "
            "overwrite another's. Nothing was changed. Use another storage for the run.",
            path=store.url,
        )
    try:
        return _read(store)
    except FileNotFoundError:
        pass
    except NotADirectoryError as error:
        if create:
            raise
        raise NoSuchStepError(
            f"{store.url} is no run: it is a file, or something above it is. Nothing was changed. Name the "
            f"folder that has {RUN} in it.",
            path=store.url,
        ) from error
    if store.list(STEPS) or store.list(ATTEMPTS):
        raise UnusableRunError(
            f"{store.url} holds steps or attempts and no {RUN}. Nothing was changed, and it is not "
            f"taken for a fresh run. Put its {RUN} back, or choose another folder.",
            path=store.url,
        )
    if not create:
        raise NoSuchStepError(
            f"{store.url} is no run: it has no {RUN}. Nothing was changed. Check the path.", path=store.url
        )
    run = Run(run_id=secrets.token_hex(8))
    return run if store.create(RUN, run.to_bytes()) else _read(store)


def _read(store: Store) -> Run:
    try:
        return Run.from_bytes(store.read(RUN, Run.MAX_BYTES), RUN)
    except DamagedError as error:
        raise DamagedError(
            f"{store.url}: {str(error).partition('. ')[0]}. Nothing of the run was used or changed, and its "
            f"steps are as whole as they were. Put the {RUN} back that was there. If it is lost, that of any "
            "other run does: it holds nothing but an id, by which a node finds what the run has in memory; "
            "what is there now is then not found any more.",
            path=RUN,
        ) from error
