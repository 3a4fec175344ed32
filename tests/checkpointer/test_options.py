"""Options as people misspell them: refused with a name, before anything is done."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flashckpt
from flashckpt import Keep, OptionError, Options
from flashckpt.store import open_store
from tests import run_view

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


@pytest.mark.usefixtures("runtime")
def test_a_word_that_is_not_understood_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    fresh, run = tmp_path / "fresh", tmp_path / "run"
    with flashckpt.attach(run, model=nn.Linear(2, 2)) as made:
        made.save()
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    attempt = run_view.newest_attempt(open_store(run))
    for wrong in CALLS:
        [name] = wrong
        with pytest.raises(OptionError, match=f"^{name}="):
            flashckpt.attach(fresh, model=model, **wrong)
        with pytest.raises(OptionError, match=f"^{name}="):
            flashckpt.loop([1], run, model=model, **wrong)
    assert not fresh.exists()
    assert torch.equal(model.weight, before)
    assert run_view.newest_attempt(open_store(run)) == attempt, "none has begun"


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (Keep, {"last": "3"}),
        (Keep, {"every_steps": 1.5}),
        (Options, {"overhead": "1%"}),
        (Options, {"slots": 2.5}),
        (Options, {"slots": 17}),  # more than a keeper gives
        (Options, {"device_memory": "2GiB"}),
        (Options, {"threads": "4"}),
        (Options, {"grace": 25}),
        (Options, {"linger": None}),
        (Options, {"watchdog": 600}),
        (Options, {"notice_file": 5}),
    ],
    ids=str,
)
def test_a_value_that_cannot_be_is_an_option_error(kind: Any, wrong: dict[str, Any]) -> None:
    [name] = wrong
    with pytest.raises(OptionError, match=name):
        kind(**wrong)
