"""What `FlashCheckpointManager` refuses, by name, before anything starts."""

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashckpt.errors import OptionError

titan: Any = None


@pytest.fixture(autouse=True, scope="module")
def _titan() -> None:
    """Import torchtitan in the tests, and not in each worker that collects them."""
    global titan
    pytest.importorskip("torchtitan")
    titan = importlib.import_module("flashckpt.torchtitan")


def _build(folder: Path, states: dict[str, Any] | None = None, **options: Any) -> Any:
    loader = object()
    trainer = SimpleNamespace(dataloader=loader, step=0)
    return titan.FlashCheckpointManager.Config(enable=True, **options).build(
        dataloader=loader, model_parts=[], optimizers=SimpleNamespace(optimizers=[]),
        lr_schedulers=SimpleNamespace(schedulers=[]),
        states={"train_state": trainer} if states is None else states, sd_adapter=None,
        base_folder=str(folder),
    )  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"initial_load_path": "/weights"}, {"load_step": 3}, {"create_seed_checkpoint": True},
        {"exclude_from_loading": ["dataloader"]}, {"enable_first_step_checkpoint": True}, {"load_only": True},
        {"last_save_in_hf": True}, {"export_dtype": "bfloat16"},
    ],
)  # fmt: skip
def test_options_of_their_own_checkpoints_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        _build(tmp_path, **options)


def test_another_step_and_another_trainer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"load\(step=7\)"):
        _build(tmp_path).load(7)
    with pytest.raises(OptionError, match="trainer that has this dataloader"):
        _build(tmp_path, states={"train_state": SimpleNamespace(dataloader=object(), step=0)})
    assert not any(tmp_path.iterdir())


def test_a_manager_that_is_not_enabled_does_nothing(tmp_path: Path) -> None:
    manager = titan.FlashCheckpointManager.Config(enable=False).build(
        dataloader=None, model_parts=[], optimizers=None, lr_schedulers=None, states={}, sd_adapter=None
    )
    assert not manager.load()
    assert not manager.save(1)
    manager.close()
