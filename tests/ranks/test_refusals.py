"""What one rank cannot do ends all of them alike, with its number and its reason, and nobody hangs."""

import json
from pathlib import Path

import pytest

from flashckpt.store.local import LocalStore
from tests import run_view
from tests.ranks.launch import Launcher
from tests.ranks.refusals import CASES

pytestmark = pytest.mark.dist

# What all ranks raise, and words that the message has.
EXPECTED = {
    "other_path": ("OptionError", "path: ", "on rank 0", "on rank 1"),
    "other_options": ("OptionError", "every: 1 on rank 0, 2 on rank 1", "Keep(last=4", "Options(slots): 2"),
    "other_remote": (
        "OptionError",
        "remote-0', every=5, keep=Keep(last=9, every_steps=None)",
        "Options(remote_storage_options): secret_access_key (values not shown, ",
    ),
    "other_names": ("OptionError", "names of the state: model on rank 0, model, ema on rank 1"),
    "other_replica": ("StateError", "extra: not there on rank 0, float32 [3] on rank 1"),
    "other_shards": (
        "StateError",
        "model.0.weight: float32 [4, 4] S0 on a mesh of [2]",
        "on rank 0, float32 [5, 4] S0 on a mesh",
        "model.1.weight: float32 [4, 6]",
    ),
    "other_lengths": ("OptionError", "batches of the loader: 5 on rank 0, 4 on rank 1"),
    "other_epochs": ("OptionError", "epochs: 2 on rank 0, 3 on rank 1"),
    "bad_loader": ("OptionError", "rank 1 of 2: ", "cannot be iterated over"),
    "bad_option": ("OptionError", "rank 1 of 2: every='often'"),
    "bad_state": ("StateError", "rank 1 of 2: ", "own"),
    "other_model": ("MismatchError", "rank 1 of 2: ", "weight"),
    "own_refused": ("StateError", "rank 1 of 2: ", "ValueError: count=1", "must not continue to train"),
    "storage_away": ("RunError", "rank 1 of 2: ", "timed out", "Start again when the storage answers"),
    "not_begun": ("KeeperError", "rank 0 of 2: ", "nothing can run beside the loop"),
    "no_runtime": ("KeeperError", "rank 1 of 2: ", "/proc/nowhere"),
    "damaged_everywhere": ("UnusableRunError", "rank 0 of 2", "rank 1 of 2"),
    "no_memory": ("OutOfSpaceError", "rank 1 of 2: ", "bytes of host memory"),
}


@pytest.fixture
def told(launcher: Launcher, tmp_path: Path) -> list[list[str]]:
    """What each rank has printed."""
    ended = launcher.fork("tests.ranks.refusals", tmp_path / "runs").finished()
    return [each.out for each in ended]


def test_all_ranks_are_refused_alike(told: list[list[str]], tmp_path: Path) -> None:
    for name in CASES:
        raised = [json.loads(line.partition(" ")[2]) for out in told for line in out if line.startswith(name)]
        if name not in EXPECTED:
            continue
        assert len(raised) == 2, name
        assert raised[0] == raised[1], f"{name}: the ranks tell different things"
        kind, *words = EXPECTED[name]
        assert raised[0][0] == kind, raised[0]
        for word in words:
            assert word in raised[0][1], (name, word, raised[0][1])
        assert "geheim" not in raised[0][1]
    [alone] = [line for out in told for line in out if line.startswith("rank_0_alone ")]
    assert "RunError" in alone
    assert "rank 1 of the default process group did not call it" in alone
    for out in told:
        assert "unchanged True" in out, "what does not fit changes nothing"
        assert "trains False after own_refused" in out
        assert "threads of ranks left: []" in out
    # A step that one rank cannot read is left by all of them.
    assert "went on True 2.0" in told[0]
    assert "went on True 12.0" in told[1]
    runs = {path.name: LocalStore(str(path)) for path in (tmp_path / "runs").iterdir()}
    begun = [name for name, store in runs.items() for _ in run_view.attempts(store)]
    for name in (
        "rank_0_alone",
        "other_path",
        "other_options",
        "other_names",
        "other_replica",
        "other_shards",
        "other_lengths",
        "other_epochs",
        "bad_loader",
        "bad_option",
        "bad_state",
        "no_runtime",
    ):
        assert name not in begun, f"{name}: refused before an attempt had started"
    for name in ("other_model", "no_memory", "own_refused", "storage_away"):
        assert begun.count(name) == 1, name
