"""All that can be said of a run, as plain JSON: what is written down beside a kept one, and read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flashckpt
from flashckpt.commit.attempts import attempts
from flashckpt.commit.lineage import everything, marks
from flashckpt.commit.steps import read_manifest, read_step
from flashckpt.format.records import Tombstone
from flashckpt.store import open_store
from tests.compat.state import tensor_sha256


def contents(run: Path) -> dict[str, Any]:
    store = open_store(run)
    steps: dict[str, Any] = {}
    for each in everything(store):
        at = f"{each.step}@{each.attempt}"
        if isinstance(read_manifest(store, each.step, each.attempt), Tombstone):
            steps[at] = "a tombstone"
            continue
        record = read_step(store, each.step, each.attempt)
        leaves = {
            leaf.name: [
                leaf.dtype,
                list(leaf.shape),
                leaf.stride and list(leaf.stride),
                list(leaf.aliases),
                f"{digest:016x}",
            ]
            for _, leaf, digest in record.rank(0).counted()
        }
        noted = [[mark.host, mark.reason] for mark in marks(store, each.step, each.attempt)]
        values = record.rank(0).values["state"]["entries"]["own"]
        steps[at] = {"boundary": record.boundary, "leaves": leaves, "own": values, "marks": noted}
    return {
        "visible": flashckpt.steps(run),
        "loaded": {
            str(step): {name: tensor_sha256(tensor) for name, tensor in flashckpt.load(run, step).items()}
            for step in flashckpt.steps(run)
        },
        "steps": steps,
        "attempts": [
            [
                str(info.name),
                info.ended,
                info.start and [str(info.start.parent), info.start.step, info.start.boundary],
                info.start and [[str(name), step] for name, step in info.start.before],
            ]
            for info in attempts(store)
        ],
    }
