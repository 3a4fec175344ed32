"""The picture of a run: one bar a peer, one panel a figure, the machine's limit as a line. Draws what
`summary` says and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.settings import GIB
from benchmarks.summary import Limits, Row, limits_of, rows_of

_OURS, _PEER, _LIMIT = "#1f6f54", "#9aa5b1", "#c0392b"


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    value: Callable[[Row], float | None]
    limit: Callable[[Limits], float | None]
    limit_name: str
    spread: Callable[[Row], tuple[float, float] | None] = lambda row: None


def _gib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else num_bytes / GIB


def _panels(limits: Limits) -> list[Panel]:
    copy = "device to host" if limits.to_host_s is not None else "memcpy"
    return [
        Panel(
            "What one checkpoint adds to the loop\n(line: least and most of all rounds)",
            "s",
            lambda row: row.loop_s,
            lambda it: it.loop_s,
            copy,
            lambda row: row.loop_range_s,
        ),
        Panel("The loop stands still (call)", "s", lambda row: row.call_s, lambda it: it.loop_s, copy),
        Panel("Durable", "s", lambda row: row.durable_s, lambda it: it.write_s, "O_DIRECT write"),
        Panel("Load", "s", lambda row: row.load_s, lambda it: it.read_s, "O_DIRECT read"),
        Panel(
            "Peak host memory", "GiB", lambda row: _gib(row.memory), lambda it: _gib(it.num_bytes), "state"
        ),
    ]


def draw(results: dict[str, Any], title: str, path: Path) -> bool:
    """Write the picture. False where matplotlib is missing; a report without one is still a report."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("agg")
    from matplotlib import pyplot

    rows = list(reversed(rows_of(results)))
    limits = limits_of(results)
    panels = _panels(limits)
    figure, axes = pyplot.subplots(
        1, len(panels), sharey=True, figsize=(4.2 * len(panels), 1.6 + 0.42 * len(rows)), layout="constrained"
    )
    for axis, panel in zip(axes, panels, strict=True):
        _draw_panel(axis, panel, rows, limits)
    axes[0].set_yticks(range(len(rows)), [row.title for row in rows])
    figure.suptitle(title, fontsize=12)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return True


def _draw_panel(axis: Any, panel: Panel, rows: list[Row], limits: Limits) -> None:
    values = [panel.value(row) for row in rows]
    limit = panel.limit(limits)
    ends = [end for row in rows for end in panel.spread(row) or ()]
    known = [value for value in values if value is not None] + ends + [limit or 0.0]
    widest = max([*known, 1e-9])
    for place, (row, value) in enumerate(zip(rows, values, strict=True)):
        if value is None:
            text = "cannot run here" if row.reason else "—"
            axis.text(0.01 * widest, place, text, va="center", fontsize=8, color="#777777")
            continue
        least, most = panel.spread(row) or (value, value)
        axis.barh(place, value, height=0.66, color=_OURS if row.name.startswith("flashckpt") else _PEER)
        axis.plot([least, most], [place, place], color="black", linewidth=1.0)
        right = max(value, most, 0.0) + 0.01 * widest
        axis.text(right, place, _number(value), va="center", fontsize=8)
    axis.set_xlabel(panel.unit)
    if limit is not None:
        axis.axvline(limit, color=_LIMIT, linewidth=1.4, linestyle="--")
        axis.set_xlabel(f"{panel.unit}  (dashed: {panel.limit_name}, {_number(limit)} {panel.unit})")
    axis.set_title(panel.title, fontsize=10)
    axis.set_xlim(min(0.0, *known), 1.2 * widest)
    axis.spines[["top", "right"]].set_visible(False)


def _number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 0.1 else f"{value:.2f}"
