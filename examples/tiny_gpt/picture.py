"""Draws the loss curves of both runs, one over the other, and what is between them."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

Losses = list[tuple[int, float]]


COLOURS = ("#1f6feb", "#d1520f", "#8250df")


def draw(
    path: Path, *, reference: Losses, pieces: list[Losses], kills: list[int], resumed: list[int]
) -> None:
    """`pieces` are the losses that each process of the killed run wrote; steps from 1. `kills` and `resumed`
    are the steps in which the processes died and from which the next ones went on."""
    figure, (curves, difference) = pyplot.subplots(
        2, 1, sharex=True, figsize=(9, 6), height_ratios=(4, 1), layout="constrained"
    )
    curves.plot(*zip(*reference, strict=True), color="#c9cdd4", linewidth=6, label="never stopped")
    names = ("until the first kill", "after the first restart", "after the second restart")
    for piece, colour, name in zip(pieces, COLOURS, names, strict=True):
        curves.plot(*zip(*piece, strict=True), color=colour, linewidth=1.4, label=name)
    curves.set_ylabel("loss, nats a byte")
    curves.set_title("The same training, never stopped and killed twice in the middle of a step")

    expected = dict(reference)
    apart = [(step, loss - expected[step]) for piece in pieces for step, loss in piece]
    difference.plot(*zip(*apart, strict=True), ".", color="#57606a", markersize=3)
    difference.set_ylabel("difference")
    difference.set_xlabel("step")
    if not any(gap for _, gap in apart):
        difference.set_ylim(-1, 1)
        difference.set_yticks([0])

    for axes in (curves, difference):
        for killed_in, resumed_from in zip(kills, resumed, strict=True):
            axes.axvline(killed_in, color="#cf222e", linestyle="--", label=f"SIGKILL in step {killed_in}")
            axes.axvline(resumed_from, color="#1a7f37", linestyle=":", label=f"resumed from {resumed_from}")
        axes.grid(alpha=0.25)
    curves.legend()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
