"""A step of one layout, taken up on another: every rank holds what it must, bit for bit."""

import os
import tempfile
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from flashckpt.capture.plan import local
from flashckpt.errors import MismatchError
from flashckpt.format.typed import LeafRef
from flashckpt.restore import merged_state
from flashckpt.restore.filling import LiveLayout, check_fits, fill
from flashckpt.restore.step_tensors import StepRanks, TensorSlice
from flashckpt.state import rng
from flashckpt.state.tree import Tree
from flashckpt.store.base import Store
from tests import run_view
from tests.commit.runs import new_run
from tests.restore import layouts
from tests.restore.sharded import Held, committed
from tests.restore.snapshots import taken

pytestmark = pytest.mark.filterwarnings("ignore")
LAYOUTS = [("whole", 1), ("whole", 3), ("fsdp", 3), ("hsdp", 4), ("fsdp+tp", 4)]


@pytest.fixture
def store() -> Iterator[Store]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield new_run(os.path.join(folder, "run"))


def taken_up(
    record: run_view.Record, kind: str, world: int, *, is_tied: bool = True, buffers: int | None = None
) -> list[str]:
    """Every rank of a layout takes the step up. Returns what is then not as it must be."""
    wrong: list[str] = []
    left: list[set[str]] = []
    had: set[str] = set()
    for rank in range(world):
        with layouts.one_of(world, rank):
            live = layouts.built(kind, world, is_tied=is_tied)
            # Half of the ranks read into their live tensors.
            snapshot = taken(live.tree, record, rank, world, is_direct=(rank + world) % 2 == 0)
            assert ("pp" in kind) == bool(snapshot.untaken), snapshot.untaken
            left.append(set(snapshot.elsewhere))
            had |= snapshot.names
            fill(live.tree, snapshot, 2)
            wrong += layouts.wrong(live, rank % record.world, rank, world, buffers)
            snapshot.discard()
    # What one leaves another has.
    return wrong + sorted(set.intersection(*left) | (set.union(*left) - had))


@pytest.mark.parametrize(("kind", "world"), LAYOUTS, ids=str)
def test_a_layout_goes_on_from_every_other(store: Store, kind: str, world: int) -> None:
    record = layouts.saved(store, kind, world)
    for other, ranks in LAYOUTS:
        assert not taken_up(record, other, ranks)


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1 flat"])
def test_fsdp1_resumes_with_the_same_ranks_only(store: Store, kind: str) -> None:
    """In its flat form, from it and to it; refused by name, and nothing changes."""
    record, other = layouts.saved(store, kind, 2), layouts.saved(store, "fsdp", 3)
    for rank in range(2):
        with layouts.one_of(2, rank):
            assert LiveLayout(layouts.built(kind, 2).tree, rank, 2).has(record)
    for layout, world, step in ((kind, 3, record), (kind, 1, record), ("whole", 1, record), (kind, 2, other)):
        with layouts.one_of(world, 0):
            live = layouts.built(layout, world)
            with pytest.raises(MismatchError, match="FSDP1") as raised:
                LiveLayout(live.tree, 0, world).begin(step)
            assert f"{step.world} ranks made it, and there are {world}" in str(raised.value)
            [(name, *_)] = raised.value.differences
            assert name.startswith("model.")


@pytest.mark.parametrize("gradient", [5.0, 0.0])
@pytest.mark.parametrize(("kind", "world"), [("whole", 2), ("fsdp", 3)], ids=str)
def test_gradients_between_two_steps_go_on(store: Store, kind: str, world: int, gradient: float) -> None:
    record = layouts.saved(store, kind, world, gradient=gradient)
    for other, ranks in (("whole", 1), ("fsdp", 2)):
        for rank in range(ranks):
            with layouts.one_of(ranks, rank):
                live = layouts.built(other, ranks)
                snapshot = taken(live.tree, record, rank, ranks)
                fill(live.tree, snapshot, 2)
                for name, parameter in live.model.named_parameters():
                    if local(parameter).numel():
                        assert parameter.grad is not None, (other, name)
                        assert (local(parameter.grad) == gradient).all(), name
                snapshot.discard()


def test_stages_of_a_pipeline_are_put_together_and_taken_apart(store: Store) -> None:
    staged = layouts.saved(store, "pp", 2, is_tied=False)
    for kind, world in (("whole", 1), ("fsdp", 3), ("pp", 2)):
        assert not taken_up(staged, kind, world, is_tied=False, buffers=1)  # only the last stage has any
    assert not taken_up(layouts.saved(store, "fsdp", 3, is_tied=False), "pp", 2, is_tied=False)


@pytest.mark.parametrize("moved", ["pp of one", "pp of three"])
def test_the_edge_of_a_pipelines_stages_is_moved(store: Store, moved: str) -> None:
    """On as many ranks: of the two one has a part of what it had, and nothing that it had not."""
    staged = layouts.saved(store, "pp", 2, is_tied=False)
    for rank in range(2):
        with layouts.one_of(2, rank):
            assert not LiveLayout(layouts.built(moved, 2, is_tied=False).tree, rank, 2).has(staged), rank
            assert LiveLayout(layouts.built("pp", 2, is_tied=False).tree, rank, 2).has(staged), rank
    assert not taken_up(staged, moved, 2, is_tied=False)


def refused(record: run_view.Record, live: layouts.Live, world: int) -> set[str]:
    """The names for which the live state cannot take the step up, and is as it was."""
    before = layouts.held_by(live)
    with pytest.raises(MismatchError) as raised:
        taken(live.tree, record, 0, world)
    assert layouts.held_by(live) == before
    names = [name for name, _, _ in raised.value.differences]
    assert len(set(names)) == len(names)
    return set(names)


def test_another_model_is_refused_with_what_differs(store: Store) -> None:
    """Names that one side lacks, and other shapes; before a byte of a tensor is read."""
    record = layouts.saved(store, "fsdp", 2)
    for path in range(2):
        os.unlink(os.path.join(store.url, record.shard_path(path)))
    with layouts.one_of(1, 0):
        live = layouts.built("whole", 1)
        live.model.register_parameter("more", nn.Parameter(torch.zeros(2)))
        assert refused(record, live, 1) == {"model.more"}
        other = layouts.Net()
        other.register_buffer("average", torch.zeros(2))
        other.norm = nn.Identity()
        gone = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
        lacking = {f"model.norm.{name}" for name in gone}
        found = refused(record, layouts.live_of(other), 1)
        assert found == {"model.average", "optimizer.groups.1", *lacking}
    with layouts.one_of(3, 0):
        live = layouts.built("fsdp", 3)
        other = layouts.Net()
        other.first = nn.Linear(6, 12)
        fully_shard(other, mesh=init_device_mesh("cpu", (3,)))
        assert refused(record, layouts.live_of(other), 3) == {"model.first.weight", "model.first.bias"}


def test_leaves_that_have_no_place_are_named_for_all_to_compare(store: Store) -> None:
    """A layer that the model has lost: each rank of several would take it for another's."""
    record = layouts.saved(store, "fsdp", 2)
    with layouts.one_of(3, 0):
        other = layouts.Net()
        other.second = nn.Identity()
        fully_shard(other, mesh=init_device_mesh("cpu", (3,)))
        live = layouts.live_of(other)
        snapshot = taken(live.tree, record, 0, 3)
        names = ["model.second.bias", "model.second.weight"]
        names += [f"optimizer.state.model.second.{name}.{key}" for name in ("bias", "weight")
                  for key in ("exp_avg", "exp_avg_sq", "step")]  # fmt: skip
        assert snapshot.untaken == tuple(names)
        snapshot.discard()


def test_parameters_that_differ_by_rank_go_on_on_as_many_ranks_alone(store: Store) -> None:
    """Tensors divided by the program's own hand: each rank's is whole, as far as anybody knows."""
    ranks = [[Held("model.w", np.full(3, rank, "float32"), TensorSlice((0,), (3,)))] for rank in range(2)]
    values = layouts.values_of({"model": {"kind": "module", "frozen": []}})
    record = committed(store, ranks, values=[values] * 2)
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(3))
    tree = Tree({"model": model})
    with pytest.raises(MismatchError, match=r"model\.w is whole on ranks 0, 1"):
        taken(tree, record, 0, 1)
    assert LiveLayout(tree, 1, 2).has(record)


def test_large_values_of_a_rank_go_on_on_another_number_of_ranks(store: Store) -> None:
    """Each rank's replay buffer has a length of its own: a new rank takes the whole of one."""
    arrays = [np.arange(20_000 + rank, dtype="float32") for rank in range(2)]
    ranks = [[Held("own.a", each, TensorSlice((0,), each.shape))] for each in arrays]
    values = []
    for each in arrays:
        about = {"value": ["numpy.array", "<f4", list(each.shape), False]}
        own = {"kind": "container", "state": {"a": LeafRef("own.a", about)}}
        values.append(layouts.values_of({"own": own}))
    record = committed(store, ranks, values=values)
    found: list[dict[str, np.ndarray]] = [{}, {}, {}]
    for rank, own in enumerate(found):
        tree = Tree({"own": own})
        snapshot = taken(tree, record, rank, 3)
        check_fits(tree, snapshot)
        fill(tree, snapshot, 2)
        snapshot.discard()
    for rank, own in enumerate(found):
        assert np.array_equal(own["a"], arrays[rank % 2])


def test_ranks_of_a_large_step_have_other_parameters(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts by the program's own hand: no rank that reads its own part alone knows of the others'."""
    monkeypatch.setattr(merged_state, "StepRanks", partial(StepRanks, small_bytes=0))
    values = [layouts.values_of({"model": {"kind": "module", "frozen": []}}, 8)] * 8
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(3))

    def taken_by_rank_1(held: list[np.ndarray], step: int, world: int) -> list[float]:
        ranks = [[Held("model.w", each, TensorSlice((0,), (3,)))] for each in held]
        record = committed(store, ranks, values=values, ranks_a_part=1, step=step)
        snapshot = taken(Tree({"model": model}), run_view.read(store, record.name), 1, world)
        found: list[float] = snapshot.tensors["model.w"].tolist()
        snapshot.discard()
        return found

    own = [np.full(3, rank, "float32") for rank in range(8)]
    with pytest.raises(MismatchError, match=r"model\.w is whole on ranks 0, 1"):
        taken_by_rank_1(own, 7, 4)
    assert taken_by_rank_1([own[5]] * 8, 8, 4) == [5.0] * 3
    assert taken_by_rank_1(own, 9, 8) == [1.0] * 3, "on as many ranks: its own"


def test_a_rank_of_the_same_layout_needs_nothing_of_others(store: Store) -> None:
    record = layouts.saved(store, "fsdp", 3)
    other = layouts.saved(store, "hsdp", 4)
    for rank in range(3):
        mine = run_view.read(store, record.name)
        with layouts.one_of(3, rank):
            assert LiveLayout(layouts.built("fsdp", 3).tree, rank, 3).has(mine)
            assert not LiveLayout(layouts.built("fsdp", 3).tree, rank, 4).has(mine)
    with layouts.one_of(4, 3):
        assert LiveLayout(layouts.built("hsdp", 4).tree, 3, 4).has(other)
        assert not LiveLayout(layouts.built("fsdp", 4).tree, 3, 4).has(other)
        assert not LiveLayout(layouts.built("fsdp+tp", 4).tree, 3, 4).has(other)


def test_new_ranks_have_random_numbers_of_their_own_and_the_same_ones_each_time(store: Store) -> None:
    record = layouts.saved(store, "whole", 2)
    found = {}
    for rank in range(4):
        with layouts.one_of(4, rank):
            tree = layouts.built("whole", 4).tree
            layout = LiveLayout(tree, rank, 4)
            states = [layout.begin(record).snapshot.values["rng"] for _ in range(2)]
            assert states[0] == states[1]
            rng.restore(states[0])
            found[rank] = torch.rand(3).tolist()
    assert len({str(each) for each in found.values()}) == 4
    torch.manual_seed(1)
    assert found[1] == torch.rand(3).tolist(), "a rank that was there goes on with its own"


def test_ranks_of_a_large_step_differ_for_a_new_rank(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 alone has drawn a number more, and its part has no box that the last rank wants."""
    monkeypatch.setattr(merged_state, "StepRanks", partial(StepRanks, small_bytes=0))
    record = layouts.saved(store, "fsdp", 8, seed=lambda rank: int(rank > 0))
    found = []
    for rank in (7, 15):
        with layouts.one_of(16, rank):
            layout = LiveLayout(layouts.built("fsdp", 16).tree, rank, 16)
            found.append(layout.begin(record).snapshot.values["rng"])
    assert found[0]["torch"] != found[1]["torch"]
