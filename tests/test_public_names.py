"""Public names are promises: a change here is a change that users see."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import flashckpt
from flashckpt import errors

NAMES = {
    "loop", "attach", "Checkpointer", "Resumed", "load", "steps", "branch", "verify", "Report", "Keep",
    "Options",
    "FlashckptError", "UsageError", "OptionError", "StateError", "BoundaryError", "MismatchError", "RunError",
    "RunHeldError", "SupersededError", "FormatError", "NoSuchStepError", "UnusableRunError", "DivergedError",
    "DamagedError", "OutOfSpaceError", "KeeperError", "PersistError", "__version__",
}  # fmt: skip


def test_names_are_these_and_no_others() -> None:
    assert set(flashckpt.__all__) == NAMES
    assert all(getattr(flashckpt, name) is not None for name in NAMES)


def test_every_error_is_public_and_of_one_tree() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, Exception)
    }
    assert defined <= NAMES
    assert all(issubclass(getattr(errors, name), errors.FlashckptError) for name in defined)


def test_what_a_checkpointer_offers() -> None:
    offered = {name for name in dir(flashckpt.Checkpointer) if not name.startswith("_")}
    assert offered == {
        "batches", "enumerate", "epochs", "step", "completed", "save", "wait", "stop", "stopping",
        "stop_reason", "close", "report",
    }  # fmt: skip


def test_what_is_switched_off_offers_the_same() -> None:
    def public(kind: type) -> set[str]:
        return {name for each in kind.__mro__ for name in vars(each) if not name.startswith("_")}

    from flashckpt.checkpointer.attach import DisabledBatches, DisabledCheckpointer
    from flashckpt.checkpointer.loops import Batches

    assert public(flashckpt.Checkpointer) <= public(DisabledCheckpointer)
    assert public(Batches) <= public(DisabledBatches) | {"checkpointer"}


def test_what_load_takes() -> None:
    parameters = inspect.signature(flashckpt.load).parameters
    assert list(parameters) == ["path", "step", "only", "strip"]
    assert (parameters["only"].default, parameters["strip"].default) == (None, False)


def test_what_dcp_offers() -> None:
    from torch.distributed import checkpoint

    from flashckpt import dcp

    assert set(dcp.__all__) == {
        "save", "async_save", "load", "close", "Writer", "Reader", "SavePlanner", "LoadPlanner", "Stager",
    }  # fmt: skip
    own: dict[str, set[str]] = {"save": set(), "async_save": set(), "load": {"step"}}
    for name, more in own.items():
        ours, torchs = (set(inspect.signature(getattr(each, name)).parameters) for each in (dcp, checkpoint))
        assert ours - torchs == more
        assert torchs - ours <= {"use_collectives"}
    assert list(inspect.signature(dcp.Writer).parameters) == ["path"]
    assert list(inspect.signature(dcp.Reader).parameters) == ["path", "step"]


def test_what_the_integrations_offer() -> None:
    """By their sources: not each framework is installed everywhere."""
    offered = {"accelerate": "attach", "lightning": "Checkpoint", "torchtitan": "FlashCheckpointManager"}
    for module, name in offered.items():
        source = Path(flashckpt.__file__).with_name(f"{module}.py").read_text()
        assert f'\n__all__ = ["{name}"]\n' in source


def test_options_and_their_defaults() -> None:
    signature = inspect.signature(flashckpt.attach)
    defaults = {name: p.default for name, p in signature.parameters.items() if p.default is not p.empty}
    assert defaults["every"] == "auto"
    assert defaults["persist_every"] == "5min"
    assert defaults["enabled"] is True
    assert [defaults[f"remote{name}"] for name in ("", "_every", "_keep")] == [None] * 3
    assert defaults["cache"] is None
    loop = inspect.signature(flashckpt.loop).parameters
    assert set(signature.parameters) <= set(loop)
    assert {"loader", "epochs", "steps"} <= set(loop)
    assert flashckpt.Keep() == flashckpt.Keep(last=3, every_steps=None)
    options = flashckpt.Options()
    assert (options.overhead, options.slots, options.linger, options.grace) == (0.01, None, "30min", "60s")
    assert (options.watchdog, options.watchdog_action) == ("auto", "report")
    assert options.signals == ("SIGTERM", "SIGINT")
    assert (options.warning_signals, options.notice_file) == (None, None)
    assert (options.storage_options, options.remote_storage_options) == ({}, None)
    assert (options.remote_compress, options.cache_limit) == ("none", None)


def imported_by(modules: str) -> set[str]:
    code = f"import sys, {modules}; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(out.stdout.split())


@pytest.mark.process
def test_the_keepers_half_imports_without_torch() -> None:
    """A keeper without torch starts in a moment and stays under its memory."""
    modules = "flashckpt, flashckpt.keeper.__main__, flashckpt.keeper.client, flashckpt.commit.verification"
    assert not {"torch", "numpy"} & imported_by(modules)


@pytest.mark.process
def test_one_process_imports_no_framework_and_nothing_of_what_ranks_need() -> None:
    """Each module is a millisecond or two of every start."""
    not_needed = {
        "flashckpt.ranks.node_state", "flashckpt.ranks.agreement", "flashckpt.ranks.decisions",
        "flashckpt.restore.merged_state", "flashckpt.persist.job", "accelerate", "torchtitan",
    }  # fmt: skip
    assert not not_needed & imported_by("flashckpt.checkpointer.resume")
