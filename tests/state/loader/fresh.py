"""Runs a function in a new process that shares only the code with the test's process."""

import multiprocessing
import traceback
from collections.abc import Callable
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the function's result; raise AssertionError with its traceback if it failed."""
    # The fork server has only imported torch, so that a new process takes milliseconds.
    _CONTEXT.set_forkserver_preload(["torch", "torch.utils.data", "numpy"])
    receive, send = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_serve, args=(send, function, arguments))
    process.start()
    send.close()
    try:
        good, result = receive.recv()
    except EOFError as error:
        process.join()
        raise AssertionError(f"the fresh process ended with {process.exitcode}") from error
    process.join()
    process.close()
    assert good, result
    return result


def _serve(send: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    # Loaders there start their workers as in a separate program.
    multiprocessing.set_start_method("fork", force=True)
    try:
        send.send((True, function(*arguments)))
    except BaseException:
        send.send((False, traceback.format_exc()))
