"""Trainer and keeper are killed, and memory is lost with them, as by a reboot: the run goes on from the
cache, with the bits of a run that nobody stopped, and reaches its home."""

from collections.abc import Callable
from pathlib import Path

import pytest

import flashckpt
from tests.cache.home import Home, cached_steps, files_in
from tests.contracts.run_contract import UrlTrainer
from tests.resume.test_resume_exact import References, references
from tests.resume.training import last_of_each
from tests.waiting import until

__all__ = ["references"]

pytestmark = pytest.mark.process


@pytest.fixture
def trainer(home: Home, tmp_path: Path, runtime: Path, cache: Path) -> UrlTrainer:
    made = UrlTrainer(home.url, tmp_path, runtime)
    made.options |= {"persist_every": 1, "cache": str(cache)}
    return made


def test_what_only_the_cache_has_is_resumed_bit_for_bit_and_reaches_home(
    home: Home, trainer: UrlTrainer, cache: Path, kill_keepers: Callable[..., None], references: References
) -> None:
    home.shut()
    trainer.kill_in_step(9)
    until(lambda: 9 in cached_steps(cache), "step 9 in the cache")
    kill_keepers(remove_regions=True)
    assert home.steps == []
    home.open()
    trainer.finish()
    [resumed] = trainer.events("resume")
    assert (resumed["tier"], resumed["step"], resumed["refused"]) == ("cache", 9, [])
    assert last_of_each(trainer.records()) == references("workers")
    assert 9 in [event["step"] for event in trainer.events("commit")]
    assert home.steps[-1] == 17
    assert flashckpt.verify(home.url).ok
    until(lambda: not files_in(cache), "an empty cache after the end in order")
