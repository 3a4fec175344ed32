"""A program that has something forked, prints both processes, and stands still until it is killed."""

from __future__ import annotations

import signal

from tests import zygote

zygote.PRELOADED = ()
print(zygote.shared().pid, zygote.start(["tests.zygote.standing"], stdout=zygote.DEVNULL).pid, flush=True)
signal.pause()
