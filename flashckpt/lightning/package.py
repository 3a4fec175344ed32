"""Which of Lightning's two packages is used, what of it is replaced or read, and the trainers that are
refused.

Owns the tables of names. They are compared with the installed release before anything starts: another
signature means another loop, and boundaries in the wrong place.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Iterator
from typing import Any

from flashckpt.checkpointer.extras import require
from flashckpt.errors import OptionError

log = logging.getLogger(__name__)

OLDEST = (2, 6)
TESTED = ("2.6.5", "2.6.6")

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _package() -> str:
    """The package that the program has imported, or else the first that is installed."""
    imported = [name for name in _PACKAGES if name in sys.modules]
    installed = [name for name in _PACKAGES if importlib.util.find_spec(name.split(".")[0]) is not None]
    if not imported and not installed:
        require("lightning", "lightning")
    return (imported or installed)[0]


PACKAGE = _package()

# By module of the package and class: replaced on the objects of one trainer while it trains.
OVERRIDDEN = {
    "trainer.trainer:Trainer._run_stage": (),
    "loops.fit_loop:_FitLoop._load_combined_loader_states": (),
    "loops.fit_loop:_FitLoop.on_run_start": (),
    "loops.fit_loop:_FitLoop.on_advance_end": (),
    "loops.training_epoch_loop:_TrainingEpochLoop.on_run_start": ("data_fetcher",),
    "loops.training_epoch_loop:_TrainingEpochLoop.advance": ("data_fetcher",),
    "loops.training_epoch_loop:_TrainingEpochLoop.on_advance_end": ("data_fetcher",),
}

# Called or made.
USED = {
    "loops.fit_loop:_FitLoop.setup_data": (),
    "loops.fit_loop:_FitLoop.on_run_end": (),
    "utilities.combined_loader:CombinedLoader.flattened": None,
    "loops.fit_loop:_FitLoop._can_stop_early": None,
    "loops.training_epoch_loop:_TrainingEpochLoop.done": None,
    "loops.fetchers:_DataFetcher.reset": (),
    "loops.progress:_BaseProgress.load_state_dict": ("state_dict",),
    "trainer.connectors.logger_connector.result:_ResultMetric.__init__": ("metadata", "is_tensor"),
    "trainer.connectors.logger_connector.result:_Metadata.__init__": (
        "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph",
        "add_dataloader_idx", "dataloader_idx", "metric_attribute", "_sync",
    ),
    "trainer.connectors.logger_connector.result:_Sync.__init__": (
        "fn", "_should", "rank_zero_only", "_op", "_group",
    ),
    "trainer.connectors.signal_connector:_SignalConnector._sigterm_notifier_fn": ("signum", "_"),
    "trainer.connectors.signal_connector:_HandlersCompose.__init__": ("signal_handlers",),
    "utilities.exceptions:SIGTERMException": None,
}  # fmt: skip

# Callbacks that change what was attached while the run goes: schedulers, or the optimizer's groups.
_REFUSED_CALLBACKS = {
    "StochasticWeightAveraging": "it replaces the schedulers in the middle of the run; use "
    "EMAWeightAveraging",
    "BaseFinetuning": "it adds groups to the optimizer in the middle of the run; give it all parameters with "
    "requires_grad=False",
}

_warned: set[str] = set()


def named(place: str) -> Any:
    """What stands at "module:Class.name" of the package; None where it is missing."""
    module, _, path = place.partition(":")
    try:
        found: Any = importlib.import_module(f"{PACKAGE}.{module}")
    except ModuleNotFoundError:
        return None
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def differences() -> Iterator[str]:
    """What the installed release lacks of the tables, or has with another signature."""
    for place, expected in {**OVERRIDDEN, **USED}.items():
        found = named(place)
        name = place.partition(":")[2]
        if found is None:
            yield f"{name} is missing"
            continue
        if expected is None:
            continue
        parameters = tuple(inspect.signature(found).parameters)[1:]
        if parameters != expected:
            yield f"{name} takes ({', '.join(parameters)}) and not ({', '.join(expected)})"


def check_release() -> None:
    """Raise OptionError where the installed release lacks what is replaced. Warns once of an untested one."""
    version: str = importlib.import_module(PACKAGE).__version__
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if numbers < OLDEST:
        raise OptionError(
            f"flashckpt.lightning needs {PACKAGE} 2.6 or newer, and {version} is installed: its loops have "
            "other parts. Nothing was started. Install a newer release, or write the loop with "
            "flashckpt.loop."
        )
    wrong = list(differences())
    if wrong:
        raise OptionError(
            f"{PACKAGE} {version} has other loops than flashckpt knows: {'; '.join(wrong)}. Nothing was "
            f"started. Install one of the releases {', '.join(TESTED)}, or a newer flashckpt."
        )
    if version not in TESTED and version not in _warned:
        _warned.add(version)
        log.warning(
            "%s %s has all names that flashckpt replaces, but its loops were not tested; tested are %s.",
            PACKAGE,
            version,
            ", ".join(TESTED),
        )


def check_trainer(trainer: Any, kind: type) -> None:
    """Raise OptionError for a trainer whose loop flashckpt cannot continue exactly. kind: the class of our
    callback."""
    for is_so, why in _refused(trainer, kind):
        if is_so:
            raise OptionError(f"flashckpt cannot checkpoint this trainer: {why}. Nothing was started.")


def _refused(trainer: Any, kind: type) -> Iterator[tuple[bool, str]]:
    fit = trainer.fit_loop
    yield (
        sum(isinstance(callback, kind) for callback in trainer.callbacks) > 1,
        "it has two callbacks flashckpt.lightning.Checkpoint; keep one",
    )
    yield (
        fit._loaded_from_state_dict,
        "a checkpoint of Lightning was loaded (fit's ckpt_path, or Slurm's requeueing), and the run's own "
        "state would replace it. Leave out ckpt_path; to begin with its weights, use load_from_checkpoint "
        "before fit; under Slurm use SLURMEnvironment(auto_requeue=False)",
    )
    strategy = {base.__name__ for base in type(trainer.strategy).__mro__}
    for name in ("DeepSpeedStrategy", "XLAStrategy", "XLAFSDPStrategy"):
        yield name in strategy, f"{name} keeps the optimizer's state inside its engine; use FSDP2"
    for callback in trainer.callbacks:
        for base in type(callback).__mro__:
            why = _REFUSED_CALLBACKS.get(base.__name__)
            yield why is not None, f"{type(callback).__name__}: {why}"
    step = getattr(trainer.lightning_module, "training_step", None)
    yield (
        step is not None and "dataloader_iter" in inspect.signature(step).parameters,
        "training_step draws batches by itself (dataloader_iter), so that those which it holds are unknown; "
        "take the batch as an argument",
    )
