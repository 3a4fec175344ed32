"""What commands take: RUN, STEP, STEP@ATTEMPT, --json. Owns their spelling and what a misspelt one raises."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import typer

from flashckpt.format.names import MAX_STEP, AttemptName

Run = Annotated[str, typer.Argument(metavar="RUN", help="The run: a folder or a file:// URL.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


class StepName(NamedTuple):
    """A step, and the attempt whose step is meant where it was named."""

    step: int
    attempt: AttemptName | None


def step_name(text: str) -> StepName:
    """1200, or 1200@000002-7fa3c1d2. Wrong usage for anything else."""
    digits, at, name = text.partition("@")
    attempt = AttemptName.parse(name) if at else None
    if not (digits.isascii() and digits.isdigit()) or int(digits[:20]) > MAX_STEP or (at and attempt is None):
        raise typer.BadParameter(
            f"{text!r} is neither a step (1200) nor a step of an attempt (1200@000002-7fa3c1d2). "
            "`flashckpt ls RUN --all` shows both."
        )
    return StepName(int(digits), attempt)
