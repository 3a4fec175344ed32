"""A program that says what it is, and ends in one of the ways in which programs end.

`python -m tests.zygote.specimen END`: one JSON object, then its end.
"""

import atexit
import json
import os
import random
import signal
import sys
import threading
import time


def told() -> dict[str, object]:
    """What a process has at its start. What must be equal whenever it is started, and nothing else."""
    with open("/proc/self/status") as file:
        status = dict(line.split(":", 1) for line in file)
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    return {
        "signals": {name: status[name].strip() for name in ("SigBlk", "SigIgn", "SigCgt", "Threads")},
        "handlers": {int(number): str(each) for number, each in handlers.items() if each != signal.SIG_DFL},
        "descriptors": sorted(number for number in map(int, os.listdir("/proc/self/fd")) if _is_open(number)),
        "threads": [thread.name for thread in threading.enumerate()],
        "arguments": sys.argv,
        "main": [sys.modules["__main__"].__spec__.name, __name__, sys.modules["__main__"].told is told],
        "path": sys.path[:1],
        "folder": os.getcwd(),
        "environment": {name: value for name, value in os.environ.items() if "OPENBLAS" not in name},
        "buffering": [stream.line_buffering for stream in (sys.stdin, sys.stdout, sys.stderr)],
        "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "read": sys.stdin.read(),
    }


def _is_open(number: int) -> bool:
    """The folder that is being listed has a descriptor too."""
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)


ENDS = {
    "returns": lambda: None,
    "exits": lambda: sys.exit(7),
    "says why": lambda: sys.exit("because"),
    "raises": lambda: 1 / 0,
    "interrupted": interrupt,
    "terminated": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "aborts": os.abort,
    "leaves": lambda: os._exit(9),
}


def last() -> None:
    """A thread that the interpreter's own end waits for, and that an abort or a signal does not."""
    threading.main_thread().join()
    print("a thread's end")


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print(json.dumps(told()))
    if sys.argv[1] == "draws":
        import numpy

        print(json.dumps([random.random(), float(numpy.random.rand())]))
        return
    sys.stdout.flush()
    atexit.register(print, "at its end")
    threading.Thread(target=last, daemon=False).start()
    ENDS[sys.argv[1]]()


if __name__ == "__main__":
    main()
