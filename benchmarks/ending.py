"""How a measuring process ends: with its result or its reason in the file its parent reads, and at once.
Libraries that leave threads or children behind must not keep the bench from going on.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.settings import Job


@contextmanager
def reporting(job: Job) -> Iterator[None]:
    """Never returns to the caller's caller: the process ends when the block does."""
    code = 0
    try:
        yield
    except BaseException as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        # Beside what was reported before: a part that fails takes nothing from those that came to their end.
        job.report({**job.reported(), "failed": f"{type(error).__name__}: {lines[0]}"})
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
