"""From raw repetitions to the figures that are shown. Medians throughout; nothing is dropped or weighted.

Every figure of a peer stands beside the machine's limit of the same run: torch's copy for what the loop
pays (to the host, on a GPU), O_DIRECT for what the disk does, one times the state for memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Limits:
    """Seconds that the machine needs at its best for the bytes of the state; None where not measured."""

    num_bytes: int
    copy_s: float
    clone_s: float | None
    to_host_s: float | None
    write_s: float | None
    read_s: float | None

    @property
    def loop_s(self) -> float:
        """What the loop would pay if it waited for one copy of the state out of its way."""
        return self.to_host_s or self.copy_s


@dataclass(frozen=True)
class Row:
    """One peer's figures, in seconds and bytes; `reason` says why there are none.

    loop_s: what one checkpoint adds to the loop, with the least and the most of all rounds. call_s: how long
    the loop stands still for it when nothing else is going on. memory: bytes of the host at their peak beyond
    those of the loop alone. exact: whether a load gave back, bit for bit, the state at the save, after which
    the loop had gone on; None where nothing could be loaded.
    """

    name: str
    title: str
    reason: str = ""
    loop_s: float | None = None
    loop_range_s: tuple[float, float] | None = None
    call_s: float | None = None
    durable_s: float | None = None
    load_s: float | None = None
    tier: str = ""
    memory: int | None = None
    state: int = 0
    exact: bool | None = None
    remark: str = ""


def limits_of(results: dict[str, Any]) -> Limits:
    """Medians over all that was measured between the peers."""
    measured = results["limits"]

    def middle(name: str) -> float | None:
        seconds = [value for each in measured for value in each.get(name, ())]
        return median(seconds) if seconds else None

    copy_s = middle("copy_s")
    assert copy_s is not None
    return Limits(
        num_bytes=measured[0]["num_bytes"],
        copy_s=copy_s,
        clone_s=middle("clone_s"),
        to_host_s=middle("to_host_s"),
        write_s=middle("write_s"),
        read_s=middle("read_s"),
    )


def row_of(peer: dict[str, Any]) -> Row:
    if "failed" in peer:
        return Row(name=peer["name"], title=peer["title"], reason=peer["failed"])
    costs = [
        (block["with_s"] - block["plain_s"]) / block["taken"] for block in peer["rounds"] if block["taken"]
    ]
    load = peer["load"] or {}
    memory = peer["memory"]
    return Row(
        name=peer["name"],
        title=peer["title"],
        loop_s=median(costs) if costs else None,
        loop_range_s=(min(costs), max(costs)) if costs else None,
        call_s=median(each["call_s"] for each in peer["alone"]),
        durable_s=median(each["durable_s"] for each in peer["alone"]) if peer["commits"] else None,
        load_s=load.get("seconds"),
        tier=load.get("tier", ""),
        memory=max(0, memory["checkpoints"] - memory["plain"]),
        state=peer["state_bytes"],
        exact=load.get("exact"),
        remark=_remark(load),
    )


def _remark(load: dict[str, Any]) -> str:
    if "failed" in load:
        return f"load: {load['failed']}"
    if load.get("exact") is False:
        return f"{load['differ']} tensors differ from the state that was saved"
    return ""


def rows_of(results: dict[str, Any]) -> list[Row]:
    return [row_of(peer) for peer in results["peers"]]
