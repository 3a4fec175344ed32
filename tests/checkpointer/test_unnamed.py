"""Objects with a state that no name covers: `attach` names them, and the loop refuses a forgotten optimizer.
What is a part of a named object, and what training does not change, is never reported."""

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel

import flashckpt
from flashckpt import StateError
from flashckpt.checkpointer.trainer_run import attach_trainer

pytestmark = pytest.mark.usefixtures("runtime")

Named = dict[str, Any]


class Average:
    """An average of weights as programs write it: no module."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = [p.detach().clone() for p in model.parameters()]

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


class Loader:
    """A loader of the program's own, with a state."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.ones(2, 4)] * 3)

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Wrapper:
    """An optimizer in a wrapper, as Accelerate's and Fabric's."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


class Whole:
    """A state of the program, which holds its parts."""

    def __init__(self, **parts: Any) -> None:
        self.parts = parts

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


class Hidden(Whole):
    """The same, whose parts no attribute holds."""

    def __init__(self, **parts: Any) -> None:
        self.get: Callable[[], dict[str, Any]] = lambda: parts

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.get().items()}


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def train(model: nn.Module, *optimizers: Any) -> None:
    model(torch.ones(2, 4)).square().mean().backward()
    for each in optimizers:
        each.step()
        each.zero_grad()


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [each for each in caplog.messages if "not saved" in each]
    caplog.clear()
    return found


# ---- variables


def test_one_line_names_what_is_forgotten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, critic = net(), net()
    optimizer = AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    averaged = AveragedModel(model)
    ema = Average(model)
    critic_optimizer = Adam(critic.parameters())
    accuracy = nn.BatchNorm1d(4)
    again = scaler  # noqa: F841 - one object is one entry
    flashckpt.attach(tmp_path, model=model, optimizer=optimizer).close()
    (line,) = told(caplog)
    for each in (
        "critic (Sequential)", "scaler (GradScaler)", "averaged (AveragedModel)", "ema (Average)",
        "critic_optimizer (Adam)",
    ):  # fmt: skip
        assert each in line
    assert "…" in line, "accuracy is the sixth"
    assert "attach(…, critic=critic, scaler=scaler, averaged=averaged, ema=ema" in line
    assert "again" not in line
    del critic, scaler, averaged, ema, critic_optimizer, again
    flashckpt.attach(tmp_path, model=model, optimizer=optimizer).close()
    (line,) = told(caplog)
    assert "attach(…, accuracy=accuracy)" in line
    flashckpt.attach(tmp_path / "named", model=model, optimizer=optimizer, accuracy=accuracy).close()
    assert told(caplog) == []


def test_attributes_of_self(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Training:
        def __init__(self) -> None:
            self.model, self.loader = net(), Loader()
            self.ema = Average(self.model)

        def run(self) -> None:
            for batch in flashckpt.loop(self.loader, tmp_path, model=self.model):
                self.model(batch)

        def state_dict(self) -> None:
            raise AssertionError("the program's own, and never called")

        def load_state_dict(self, state: object) -> None: ...

    Training().run()
    (line,) = told(caplog)
    assert "not saved, because no name covers it: self.ema (Average). After a resume" in line
    assert "attach(…, ema=self.ema)" in line


def test_a_name_that_the_call_has_is_not_proposed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    state = Average(model)
    flashckpt.attach(tmp_path, model=model).close()
    (line,) = told(caplog)
    assert "attach(…, my_state=state)" in line
    assert state.shadow


def test_parts_of_what_is_named_and_what_nothing_changes_are_silent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    encoder, wrapped, parallel = model[0], nn.Sequential(model), nn.DataParallel(model)
    inner = Adam(model.parameters())
    optimizer = Wrapper(inner)
    scheduler = StepLR(inner, 2)
    loss, weighted = nn.CrossEntropyLoss(), nn.CrossEntropyLoss(weight=torch.ones(4))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    teacher, frozen = net().eval(), net().requires_grad_(False)
    loader, kind = Loader(), Average
    own = Average(model)
    whole = Whole(own=own)
    flashckpt.attach(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler, whole=whole).close()
    assert told(caplog) == []
    assert all(
        each is not None for each in (encoder, wrapped, parallel, loss, weighted, scaler, teacher, frozen)
    )
    assert loader.place == 0
    assert kind is Average


@pytest.mark.parametrize("changes", [True, False])
def test_a_frozen_copy_is_reported_once_it_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: bool
) -> None:
    model = net()
    optimizer = Adam(model.parameters())
    ema = copy.deepcopy(model).eval().requires_grad_(False)
    for _ in flashckpt.loop(Loader(), tmp_path, model=model, optimizer=optimizer, epochs=2):
        train(model, optimizer)
        if changes:
            for mine, theirs in zip(ema.parameters(), model.parameters(), strict=True):
                mine.data.lerp_(theirs.data, 0.1)
    found = told(caplog)
    assert len(found) == changes
    assert not changes or "changed in training and not saved, because no name covers it: ema (Seq" in found[0]


def test_variables_are_not_kept_alive_and_a_programs_own_locals_stay(tmp_path: Path) -> None:
    def script() -> None:
        model, ema = net(), net()
        copied = weakref.ref(ema)
        checkpointer = flashckpt.attach(tmp_path, model=model)
        del ema
        gc.collect()
        assert copied() is None
        checkpointer.close()
        mine = locals()
        flashckpt.attach(tmp_path, model=model).close()
        assert mine["model"] is model

    script()


# ---- optimizers that step


def test_a_forgotten_optimizer_is_refused_at_its_first_boundary(tmp_path: Path) -> None:
    model = net()
    optimizer = Adam(model.parameters())
    batches = flashckpt.loop(Loader(), tmp_path, every=1, model=model)
    next(batches)
    train(model)  # an accumulation: the second iteration steps
    next(batches)
    train(model, optimizer)
    with pytest.raises(StateError, match=r"model\.0\.weight is stepped by an Adam .*optimizer=<the Adam>"):
        next(batches)
    checkpointer = flashckpt.attach(tmp_path, model=model)  # the run was released
    assert checkpointer.completed == 1, "the boundary before it was whole"
    checkpointer.close()


def test_save_refuses_it_too(tmp_path: Path) -> None:
    model = net()
    optimizer = Adam(model.parameters())
    with flashckpt.attach(tmp_path, every=None, model=model) as checkpointer:
        train(model, optimizer)
        for _ in range(2):
            with pytest.raises(StateError, match="not part of the state"):
                checkpointer.save()


def accepted(model: nn.Module, optimizer: Optimizer) -> dict[str, Callable[[], Named]]:
    return {
        "in a state that holds a wrapper": lambda: {"whole": Whole(all=Whole(optimizer=Wrapper(optimizer)))},
        "saved by code that hides it": lambda: {"whole": Hidden(optimizer=optimizer)},
    }


@pytest.mark.parametrize("how", accepted(net(), SGD(net().parameters())))
def test_an_optimizer_that_is_saved_is_accepted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    model = net()
    optimizers = [Adam(model.parameters())]  # in no variable of its own
    named = accepted(model, optimizers[0])[how]()
    for _ in flashckpt.loop(Loader(), tmp_path, every=1, model=model, **named):
        train(model, *optimizers)
    assert told(caplog) == []


def test_what_a_resume_does_not_lose_is_accepted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, other = net(), net()
    plain, of_other = [SGD(model.parameters())], [Adam(other.eval().parameters())]
    for _ in flashckpt.loop(Loader(), tmp_path, every=1, model=model):
        train(model, *plain)  # without a state
        train(other, *of_other)
        for _ in range(2):
            train(model, Adam(model.parameters()))  # is gone before the boundary
    assert not [each for each in told(caplog) if "is stepped by" in each]


def test_one_that_is_built_later_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    optimizer: Optimizer = Adam(model.parameters())
    batches = flashckpt.loop(Loader(), tmp_path, every=1, epochs=2, model=model, optimizer=optimizer)
    for _ in batches:
        if batches.completed == 3:
            optimizer = SGD(model.parameters(), momentum=0.9)
        train(model, optimizer)
    assert batches.completed == 6
    (line,) = told(caplog)
    assert "model.0.weight is stepped by a SGD that is not part of the state" in line


def test_one_of_a_named_scheduler_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The scheduler's own state leaves it out."""
    model = net()
    parts = [Adam(model.parameters())]
    scheduler = StepLR(parts[0], 2)
    for _ in flashckpt.loop(Loader(), tmp_path, every=1, model=model, scheduler=scheduler):
        train(model, *parts)
        scheduler.step()
    (line,) = told(caplog)
    assert "is stepped by an Adam that is not part of the state" in line


def test_a_trainer_with_its_own_loop_is_never_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    optimizer = Adam(model.parameters())
    run = attach_trainer(tmp_path, {"model": model}, integration="testing", on_stop=print, every=1)
    assert told(caplog) == []
    tap = run.tap(Loader())
    for trained, _ in enumerate(tap, 1):
        run.begin()
        train(model, optimizer)
        run.end_iteration(trained=trained)
    run.close()
    assert len(told(caplog)) == 1
