"""The ends of runs with a cache: a signal is content with it, `wait()` and `close()` mean the home, and an
end in order leaves nothing on the disk."""

import signal
import threading
from pathlib import Path

import pytest

import flashckpt
from flashckpt.checkpointer.run import saved_now
from tests import zygote
from tests.cache.home import Home, cached_steps, files_in
from tests.cache.loop import Training
from tests.contracts.run_contract import UrlTrainer
from tests.processes import keepers_of
from tests.waiting import until

pytestmark = pytest.mark.process


def signalled(trainer: UrlTrainer, folder: Path, step: int) -> zygote.Program:
    """A trainer to which a signal was sent in the iteration of a step, and which goes on with it."""
    trainer.options["release"] = str(folder / "release")
    process = trainer.start(hold_at=step)
    assert process.stdout.readline() == f"held {step}\n"
    process.send_signal(signal.SIGTERM)
    until(lambda: "SIGTERM: the loop ends in order" in (folder / "err").read_text(), "the signal")
    (folder / "release").touch()
    return process


def ended(process: zygote.Program) -> int:
    status = process.wait(240)
    process.stdout.close()
    return status


def test_a_signal_waits_for_a_home_that_opens_within_the_grace(
    home: Home, tmp_path: Path, runtime: Path, cache: Path
) -> None:
    home.shut()
    trainer = UrlTrainer(home.url, tmp_path, runtime)
    trainer.options |= {"persist_every": 1, "cache": str(cache)}
    process = signalled(trainer, tmp_path, 3)
    until(lambda: 4 in cached_steps(cache), "the last boundary in the cache")
    assert process.poll() is None
    home.open()
    assert ended(process) == -signal.SIGTERM
    assert home.steps[-1] == 4
    assert "is in the cache of its nodes" not in Path(tmp_path / "err").read_text()


def test_a_signal_ends_a_run_whose_home_takes_nothing_and_the_keeper_brings_home_what_is_cached(
    home: Home, tmp_path: Path, runtime: Path, cache: Path
) -> None:
    home.shut()
    trainer = UrlTrainer(home.url, tmp_path, runtime)
    trainer.options |= {"persist_every": 1, "cache": str(cache), "options": {"grace": "4s"}}
    assert ended(signalled(trainer, tmp_path, 3)) == -signal.SIGTERM
    said = Path(tmp_path / "err").read_text()
    assert f"is in the cache of its nodes ({cache}); their keepers write it to {home.url}" in said
    assert "not everything is persisted" not in said
    assert cached_steps(cache)[-1] == 4, "the boundary after the iteration in which the signal came"
    home.open()
    until(lambda: not keepers_of(runtime), "the keeper's end")
    assert home.steps[-1] == 4
    assert flashckpt.verify(home.url).ok
    assert files_in(cache) == []


def test_wait_and_close_mean_the_home(home: Home, cache: Path, runtime: Path) -> None:
    run = Training(home.url, cache)
    run.train(2)
    home.shut()
    run.made.save()
    until(lambda: 2 in cached_steps(cache), "the step in the cache")
    opening = threading.Timer(0.3, home.open)
    opening.start()
    run.made.wait()
    assert 2 in home.steps
    opening.join()
    run.train(3)
    run.made.close()
    assert home.steps[-1] == 3
    until(lambda: not files_in(cache), "an empty cache")


def test_the_cache_takes_every_persist_and_a_slow_home_the_newest(
    home: Home, cache: Path, runtime: Path
) -> None:
    run = Training(home.url, cache, options=flashckpt.Options(slots=2))
    home.shut()

    def trained() -> int:
        """Train a step; the newest in the cache."""
        run.train(run.made.completed + 1)
        return max(cached_steps(cache), default=0)

    until(lambda: trained() >= 10, "new snapshots in the cache while the home takes nothing")
    assert home.steps == []
    late = run.made.completed
    home.open()
    until(lambda: trained() and home.steps[-1:] > [late], "a step that was asked for after the home opened")
    run.made.close()
    assert home.steps[-1] == run.made.completed
    assert len([each for each in home.steps if each <= late]) <= 2, "what the cache alone took is not copied"


def test_slots_are_written_anew_while_the_home_takes_nothing_and_the_wait_for_one_ends(
    home: Home, cache: Path, runtime: Path
) -> None:
    run = Training(home.url, cache, options=flashckpt.Options(slots=2), persist_every=None)
    home.shut()
    run.train(5, saves=True)
    waited = saved_now(run.made)  # of step 5, whose slot is written anew before it is at home
    run.train(9, saves=True)
    until(lambda: cached_steps(cache)[-1:] == [9], "the newest step in the cache")
    assert run.made.report()["snapshots_skipped"] == 0
    assert home.steps == []
    home.open()
    waited()
    assert 5 in home.steps
    run.made.close()
    assert home.steps[-1] == 9
    assert flashckpt.verify(home.url).ok
