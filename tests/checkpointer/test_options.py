"""Options as people misspell them: refused with a name, before anything is done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flashckpt
from flashckpt import Keep, OptionError, Options

pytestmark = pytest.mark.usefixtures("runtime")

CALLS: list[dict[str, Any]] = [
    {"every": "10min"},
    {"every": "always"},
    {"every": 0},
    {"every": 2.5},
    {"every": True},
    {"persist_every": "often"},
    {"persist_every": 300.0},
    {"persist_every": -1},
    {"keep": 3},
    {"keep": None},
    {"options": {"grace": "5s"}},
]


@pytest.mark.parametrize("wrong", CALLS, ids=str)
def test_a_word_that_is_not_understood_is_refused_before_anything_is_done(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    [(name, value)] = wrong.items()
    fresh, run = tmp_path / "fresh", tmp_path / "run"
    with pytest.raises(OptionError, match=f"^{name}="):
        flashckpt.attach(fresh, model=nn.Linear(2, 2), **wrong)
    assert not fresh.exists()
    with flashckpt.attach(run, model=nn.Linear(2, 2)) as made:
        made.save()
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    versions = sorted((run / "catalogue").iterdir())
    with pytest.raises(OptionError, match=f"^{name}="):
        flashckpt.loop([1], run, model=model, **wrong)
    assert torch.equal(model.weight, before)
    assert sorted((run / "catalogue").iterdir()) == versions


@pytest.mark.parametrize(
    "make",
    [
        lambda: Keep(last="3"),  # type: ignore[arg-type]
        lambda: Keep(every_steps=1.5),  # type: ignore[arg-type]
        lambda: Options(overhead="1%"),  # type: ignore[arg-type]
        lambda: Options(slots=2.5),  # type: ignore[arg-type]
        lambda: Options(device_memory="2GiB"),  # type: ignore[arg-type]
        lambda: Options(threads="4"),  # type: ignore[arg-type]
        lambda: Options(grace=25),  # type: ignore[arg-type]
        lambda: Options(linger=None),  # type: ignore[arg-type]
        lambda: Options(watchdog=600),  # type: ignore[arg-type]
        lambda: Options(notice_file=5),  # type: ignore[arg-type]
    ],
)
def test_a_value_of_another_kind_is_an_option_error(make: Callable[[], object]) -> None:
    with pytest.raises(OptionError):
        make()


def test_more_slots_than_a_keeper_gives_are_an_option_error() -> None:
    """Refused by the keeper at each boundary, a run went on without one snapshot."""
    assert Options(slots=16).slots == 16
    with pytest.raises(OptionError, match="1 to 16"):
        Options(slots=17)
