"""When something that has failed, or that waits for others, is tried again. Owns these times, and no
other."""

from __future__ import annotations

from collections.abc import Callable

_LONGEST_PAUSE_S = 300.0
_LONGEST_LOOK_S = 10.0
_FIRST_LOOK_S = 0.25
_MOST_DOUBLINGS = 10
_FEW_PAUSES_S = (0.1, 0.5, 2.0)

# Seconds before the try that follows so many that failed; None where none follows.
Pauses = Callable[[int], float | None]


def pause_s(tries: int) -> float:
    """Without end: a server may be away for a long weekend."""
    # That is a thousand tries, and two to that power is no number.
    return min(2.0 ** min(tries - 1, _MOST_DOUBLINGS), _LONGEST_PAUSE_S)


def few_pauses_s(tries: int) -> float | None:
    """While somebody waits: a server's hiccup is over by then, a full disk is not."""
    return _FEW_PAUSES_S[tries - 1] if tries <= len(_FEW_PAUSES_S) else None


def look_again_s(looks: int) -> float:
    """Until it is looked again whether the parts of other nodes are there. Who writes the last one commits
    the step; others look only in case that one has died."""
    return min(_FIRST_LOOK_S * 2.0 ** min(looks - 1, _MOST_DOUBLINGS), _LONGEST_LOOK_S)
