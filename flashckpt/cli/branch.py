"""`flashckpt branch`: make the next start of a run go on from another step. Deletes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from flashckpt.cli.arguments import AsJson, Run, place
from flashckpt.cli.exit_codes import ExitCode
from flashckpt.cli.output import ends, results, write_json
from flashckpt.commit.attempts import read_start
from flashckpt.commit.branching import branch as start_at
from flashckpt.commit.holder import Probe, here
from flashckpt.commit.run import open_run
from flashckpt.format.names import RUN
from flashckpt.format.records import Holder
from flashckpt.memory.runtime import RuntimeFolder, base_folder, identity_of, is_alive
from flashckpt.options import Environment
from flashckpt.store.base import Store, open_store

Step = Annotated[
    str, typer.Argument(metavar="STEP[@ATTEMPT]", help="A visible step, or one of another branch.")
]


@ends
def branch(run: Run, step: Step, as_json: AsJson = False) -> ExitCode:
    """Go on from another step: the next start of the run resumes there. Nothing is deleted.

    Refused while a job holds the run; a job on another machine is watched for a few seconds first.
    """
    store = open_store(run)
    number, attempt = place(step)
    with _holder(store) as (me, probe):
        name = start_at(store, number, attempt, me=me, probe=probe)
    start = read_start(store, name)
    parent = None if start is None or start.parent is None else str(start.parent)
    if as_json:
        write_json({"run": store.url, "attempt": str(name), "step": number, "parent": parent})
    else:
        results().print(
            f"The next start of {store.url} goes on from step {number} of attempt {parent}. Later steps stay "
            f"as another branch: `flashckpt ls {run} --all` shows them. (This branch is attempt {name}.)"
        )
    return ExitCode.WELL


@contextmanager
def _holder(store: Store) -> Iterator[tuple[Holder, Probe | None]]:
    """This process, and a way to ask for the life of trainers on this machine; without the run's runtime
    folder there is none to ask, and the counter of the newest attempt is watched instead."""
    identity = identity_of(open_run(store, create=False).run_id, os.stat(store.local_path(RUN)))
    try:
        folder = RuntimeFolder.open(base_folder(Environment.read().runtime_folder), identity, create=False)
    except FileNotFoundError:
        yield here(), None
        return
    try:
        yield here(folder.path), lambda _, lock: is_alive(folder, lock)
    finally:
        folder.close()
