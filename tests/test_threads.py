"""What a signal ends, and what it leaves."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from flashckpt.threads import results
from tests.waiting import until


def test_threads_end_also_after_a_second_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    def cancel(future: Future[int]) -> bool:
        raise KeyboardInterrupt

    made = results("test", [lambda: 1] * 5, threads=2)
    assert next(made) == 1
    monkeypatch.setattr(Future, "cancel", cancel)
    with pytest.raises(KeyboardInterrupt):
        made.close()
    until(lambda: all(each.name != "flashckpt-test" for each in threading.enumerate()), "the threads' end")
