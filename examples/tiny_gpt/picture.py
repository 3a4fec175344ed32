"""Draws the loss curves of all runs over each other, and their differences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from two_ranks import TwoRanks

Losses = list[tuple[int, float]]

COLOURS = ("#1f6feb", "#d1520f", "#8250df")
_GREY, _KILL, _RESUME = "#c9cdd4", "#cf222e", "#1a7f37"


def draw(
    path: Path,
    *,
    reference: Losses,
    pieces: list[Losses],
    kills: list[int],
    resumed: list[int],
    ranks: TwoRanks,
) -> None:
    """Draw to `path`. `pieces`: the losses of each process of the killed run. `kills`, `resumed`: the steps
    in which processes died and from which the next ones resumed. Steps count from 1."""
    figure, axes = pyplot.subplots(
        2, 2, sharex="col", figsize=(13, 6), height_ratios=(4, 1), width_ratios=(5, 4), layout="constrained"
    )
    _draw_one(axes[:, 0], reference, pieces, kills, resumed)
    _draw_ranks(axes[:, 1], ranks)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _draw_one(
    axes: Any, reference: Losses, pieces: list[Losses], kills: list[int], resumed: list[int]
) -> None:
    curves, difference = axes
    curves.plot(*zip(*reference, strict=True), color=_GREY, linewidth=6, label="reference")
    names = ("until the first kill", "after the first restart", "after the second restart")
    for piece, colour, name in zip(pieces, COLOURS, names, strict=True):
        curves.plot(*zip(*piece, strict=True), color=colour, linewidth=1.4, label=name)
    curves.set_ylabel("loss, nats per byte")
    curves.set_title("One process, killed twice in the middle of a step")
    expected = dict(reference)
    _draw_difference(difference, [(step, loss - expected[step]) for piece in pieces for step, loss in piece])
    difference.set_ylabel("difference")
    _mark(axes, kills, resumed, "SIGKILL in step")


def _draw_ranks(axes: Any, ranks: TwoRanks) -> None:
    curves, difference = axes
    differences: Losses = []
    for rank, expected in enumerate(ranks.reference):
        label = "reference" if rank == 0 else None
        curves.plot(*zip(*expected, strict=True), color=_GREY, linewidth=6, label=label)
        differences += [(step, loss - dict(expected)[step]) for step, loss in ranks.losses[rank]]
    for rank, (losses, lines) in enumerate(zip(ranks.losses, ranks.lines, strict=True)):
        for piece, style, name in (
            (losses[:lines], "-", "until the kill"),
            (losses[lines:], (0, (2, 1)), "after torchrun's restart"),
        ):
            curves.plot(
                *zip(*piece, strict=True), color=COLOURS[rank], linestyle=style, linewidth=1.4,
                label=f"rank {rank} {name}",
            )  # fmt: skip
    curves.set_title("Two ranks under torchrun, one of them killed")
    _draw_difference(difference, differences)
    _mark(axes, [ranks.killed_in], [ranks.resumed_from], "SIGKILL of rank 1 in step")


def _draw_difference(difference: Any, differences: Losses) -> None:
    difference.plot(*zip(*differences, strict=True), ".", color="#57606a", markersize=3)
    difference.set_xlabel("step")
    if not any(gap for _, gap in differences):
        difference.set_ylim(-1, 1)
        difference.set_yticks([0])


def _mark(axes: Any, kills: list[int], resumed: list[int], what: str) -> None:
    for each in axes:
        for killed_in, resumed_from in zip(kills, resumed, strict=True):
            each.axvline(killed_in, color=_KILL, linestyle="--", label=f"{what} {killed_in}")
            each.axvline(resumed_from, color=_RESUME, linestyle=":", label=f"resumed from {resumed_from}")
        each.grid(alpha=0.25)
    axes[0].legend(framealpha=1)
