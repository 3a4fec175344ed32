"""What a small step costs on a server: seconds from `save()` until it is committed, and requests, counted by
a proxy in a run of its own, since the proxy costs time. Beside it: one PUT of the same bytes by obstore."""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import flashckpt
from benchmarks.stores.clients import Obstore, Place
from tests.stores.proxy import Proxy, Request
from tests.stores.s3_server import S3Server

_FLOATS = 1 << 18
_STEPS = 12
# The first steps pass while slots are made.
_FIRST = 4


def measured(server: S3Server, place: Place, runtime: Path) -> dict[str, Any]:
    runtime.mkdir()
    os.environ["FLASHCKPT_RUNTIME"] = str(runtime)
    options: dict[str, Any] = server.options()
    commit_s, _ = _trained(f"s3://{place.bucket}/a", options, [])
    with Proxy(server.endpoint) as proxy:
        options["endpoint"] = proxy.endpoint
        _, requests = _trained(f"s3://{place.bucket}/b", options, proxy.requests)
    return {"put_s": _puts(place), "commit_s": commit_s, "requests": requests}


def _trained(
    url: str, options: dict[str, Any], seen: list[Request]
) -> tuple[list[float], list[Counter[str]]]:
    """Of each step: seconds, and those of the requests that were seen meanwhile, by their method."""
    own, seconds, counted = flashckpt.Options(storage_options=options), [], []
    with flashckpt.attach(url, every=None, options=own, w=torch.zeros(_FLOATS)) as run:
        for _ in range(_STEPS):
            run.step()
            seen.clear()
            began = time.perf_counter()
            run.save()
            run.wait()
            seconds.append(time.perf_counter() - began)
            counted.append(Counter(each.method for each in seen))
    return seconds[_FIRST:], counted[_FIRST:]


def _puts(place: Place) -> list[float]:
    client, data, seconds = Obstore(place), bytes(4 * _FLOATS), []
    for step in range(_STEPS):
        began = time.perf_counter()
        client.put(f"put/{step}", data)
        seconds.append(time.perf_counter() - began)
    return seconds[_FIRST:]


def show(found: dict[str, Any]) -> None:
    commit, put = statistics.median(found["commit_s"]), statistics.median(found["put_s"])
    totals = [sum(each.values()) for each in found["requests"]]
    print(
        f"\na step of {4 * _FLOATS >> 20} MiB: committed {1e3 * commit:.0f} ms after `save()`, in "
        f"{statistics.median(totals):.0f} requests (with what keeper and trainer ask by the clock); one PUT "
        f"of its bytes by obstore takes {1e3 * put:.0f} ms"
    )
