"""The process that forks. `python -m tests.zygote SOCKET MODULE...`: imports the modules; then a
message asks for a fork, or how one has ended.

Starts no thread and touches no signal: what it forks would have it too. When nobody is left to ask, what it
has forked and not reaped is killed.
"""

import contextlib
import json
import os
import runpy
import signal
import socket
import sys
from typing import Any

from tests.zygote.forking import MESSAGE_BYTES, forget, preload
from tests.zygote.keepers import fork_keepers


class Nursery:
    """What was forked and is not reaped yet."""

    def __init__(self, asked: socket.socket) -> None:
        self._asked, self._pids = asked, set[int]()

    def serve(self) -> list[str]:
        """Returns in a forked child alone, with what it is to run; ends the process otherwise."""
        while True:
            message, descriptors, _, _ = socket.recv_fds(self._asked, MESSAGE_BYTES, 3)
            if not message:
                self._end()
            what, about = json.loads(message)
            try:
                done = self._reaped(about) if what == "reap" else os.fork()
                answer: dict[str, Any] = {"done": done}
            except OSError as error:
                done, answer = -1, {"failed": str(error)}
            if what == "fork":
                if done == 0:
                    return self._become(descriptors, *about)
                self._pids.update({done} - {-1})
            for descriptor in descriptors:
                os.close(descriptor)
            self._asked.send(json.dumps(answer).encode())

    def _reaped(self, pid: int) -> int:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self._pids.discard(pid)
        return status

    def _end(self) -> None:
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in self._pids:
            os.waitpid(pid, 0)
        os._exit(0)

    def _become(
        self, descriptors: list[int], arguments: list[str], environment: dict[str, str], new_session: bool
    ) -> list[str]:
        """A fresh process's streams, session, environment and random numbers."""
        if new_session:
            os.setsid()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        self._asked.close()
        os.environ.clear()
        os.environ.update(environment)
        forget()
        if "flashckpt.keeper.start" in sys.modules:
            fork_keepers()
        return arguments


def main() -> None:
    asked = socket.socket(fileno=int(sys.argv[1]))
    asked.set_inheritable(False)
    preload(sys.argv[2:])
    module, *arguments = Nursery(asked).serve()
    sys.argv[1:] = arguments
    # An exception, an exit status and an interrupt go on from here to the interpreter's own end.
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
