"""Draws the loss curves of both runs, one over the other, and what is between them."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

Losses = list[tuple[int, float]]


def draw(
    path: Path, *, reference: Losses, before: Losses, after: Losses, killed_in: int, resumed_from: int
) -> None:
    """`before` and `after` are the losses that the two processes of the killed run wrote; steps from 1."""
    figure, (curves, difference) = pyplot.subplots(
        2, 1, sharex=True, figsize=(9, 6), height_ratios=(4, 1), layout="constrained"
    )
    curves.plot(*zip(*reference, strict=True), color="#c9cdd4", linewidth=6, label="never stopped")
    curves.plot(*zip(*before, strict=True), color="#1f6feb", linewidth=1.4, label="until the kill")
    curves.plot(*zip(*after, strict=True), color="#d1520f", linewidth=1.4, label="after the restart")
    curves.set_ylabel("loss, nats a byte")
    curves.set_title("The same training, never stopped and killed in the middle of a step")

    expected = dict(reference)
    apart = [(step, loss - expected[step]) for step, loss in before + after]
    difference.plot(*zip(*apart, strict=True), ".", color="#57606a", markersize=3)
    difference.set_ylabel("difference")
    difference.set_xlabel("step")
    if not any(gap for _, gap in apart):
        difference.set_ylim(-1, 1)
        difference.set_yticks([0])

    for axes in (curves, difference):
        axes.axvline(killed_in, color="#cf222e", linestyle="--", label=f"SIGKILL in step {killed_in}")
        axes.axvline(resumed_from, color="#1a7f37", linestyle=":", label=f"resumed from step {resumed_from}")
        axes.grid(alpha=0.25)
    curves.legend()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
