"""What a process without flashckpt does about the same signals: the measure of the other one.

`python -m tests.signals.control [leaves]`. Says "held" and stands still.
"""

from __future__ import annotations

import signal
import sys

from tests.signals.conduct import expect_interrupts, leave_by_signal, say

if __name__ == "__main__":
    expect_interrupts()
    if sys.argv[1:]:
        leave_by_signal()
    say("held")
    while True:
        signal.pause()
