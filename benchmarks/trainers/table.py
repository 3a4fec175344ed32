"""The figures of this benchmark as a table in Markdown, for a page of docs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from benchmarks.trainers import VARIANTS


def lines(results: dict[str, Any]) -> Iterator[str]:
    """A table for each framework: the loop's cost, what a kill costs, how long a start takes."""
    every = results["settings"]["save_every"]
    names = {
        "plain": "no checkpoints",
        "own": f"its own, every {every} steps",
        "auto": 'flashckpt, every="auto"',
        "every step": "flashckpt, every step",
    }
    for framework, found in results["frameworks"].items():
        yield f"**{framework} {found.get('version', '')}**"
        yield ""
        yield "| | seconds a step | cost of the loop | steps lost at a kill | first step after it, s |"
        yield "| --- | --- | --- | --- | --- |"
        for variant in VARIANTS:
            if variant in found["starts"] or variant in found["failed"]:
                yield f"| {names[variant]} | {' | '.join(_cells(found, variant))} |"
        yield ""


def _cells(found: dict[str, Any], variant: str) -> list[str]:
    if variant in found["failed"]:
        return [f"cannot run here: {found['failed'][variant]}", "", "", ""]
    steps = [turn[variant] for turn in found["turns"] if variant in turn]
    pairs = [
        turn[variant] / turn["plain"] - 1 for turn in found["turns"] if {variant, "plain"} <= turn.keys()
    ]
    kills = found["kills"].get(variant, [])
    return [
        _spread(steps, "{:.3f}"),
        "" if variant == "plain" else _spread(pairs, "{:+.1%}"),
        _spread([each["lost"] for each in kills], "{:.0f}"),
        _spread([each["step_done_s"] for each in kills], "{:.1f}"),
    ]


def _spread(values: Sequence[float], form: str) -> str:
    """Median (least to most)."""
    if not values:
        return ""
    return f"{form.format(median(values))} ({form.format(min(values))} to {form.format(max(values))})"
