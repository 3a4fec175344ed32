"""The five ways to copy a leaf, and which is the next safer one. Owns names and their order only."""

from __future__ import annotations

from enum import Enum


class Way(str, Enum):
    """How a leaf's bytes get from where it lives into a slot. See docs/capture.md."""

    HOST = "host"
    CLONE = "clone"
    GATE = "gate"
    WAIT = "wait"
    CONSTANT = "constant"


# A leaf found torn by a way is copied by this one from then on. WAIT has none: whatever way it came from, a
# torn leaf of a device is a synchronised one from then on: the host waits for the whole device before the
# copy and until it has ended, and what is torn even so is refused, every time. HOST has none either: nothing
# holds back a thread that writes, so the source is checked in every capture from then on.
SAFER = {
    Way.CONSTANT: Way.WAIT,
    Way.CLONE: Way.WAIT,
    Way.GATE: Way.WAIT,
    Way.WAIT: Way.WAIT,
    Way.HOST: Way.HOST,
}
