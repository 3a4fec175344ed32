"""What a signal ends, and what it leaves."""

import threading
from concurrent.futures import Future

import pytest

from flashckpt.threads import results, start_thread
from tests.waiting import until


def test_a_signal_while_a_thread_starts_is_no_lack_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        """As the wait for the thread's start ends where two signals arrive in turn."""
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("release unlocked lock")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="release unlocked lock") as raised:
        start_thread("flashckpt-test", lambda: None)
    assert type(raised.value.__context__) is KeyboardInterrupt


def test_threads_end_also_after_a_second_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    def cancel(future: Future[int]) -> bool:
        raise KeyboardInterrupt

    made = results("test", [lambda: 1] * 5, threads=2)
    assert next(made) == 1
    monkeypatch.setattr(Future, "cancel", cancel)
    with pytest.raises(KeyboardInterrupt):
        made.close()
    until(lambda: all(each.name != "flashckpt-test" for each in threading.enumerate()), "the threads' end")
