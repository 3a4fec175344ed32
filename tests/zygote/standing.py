"""A program that stands still until it is killed."""

import signal

print("stands", flush=True)
signal.pause()
