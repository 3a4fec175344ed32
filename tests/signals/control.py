"""What a process without flashckpt does about the same signals: the measure of the other one.

`python -m tests.signals.control ORDERS-JSON`. Says "held" and stands still until the file `go` exists.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.signals.conduct import expect_interrupts, install, say, stand_still


def main() -> None:
    orders = json.loads(sys.argv[1])
    expect_interrupts()
    if orders.get("handler"):
        install(orders["handler"], lambda: None)
    say("held")
    stand_still(Path(orders["go"]))
    say("after")


if __name__ == "__main__":
    main()
