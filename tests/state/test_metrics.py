"""Metrics of torchmetrics keep their states, anywhere in the state."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashckpt.errors import StateError
from flashckpt.state.tree import Tree
from tests.state.image import assert_same, capture, restore

torchmetrics: Any = None

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True, scope="module")
def _torchmetrics() -> None:
    """Import torchmetrics in the tests, and not in each worker that collects them."""
    global torchmetrics
    torchmetrics = pytest.importorskip("torchmetrics")


def accuracy(average: str = "macro") -> Any:
    return torchmetrics.classification.MulticlassAccuracy(num_classes=3, average=average)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.metric = accuracy()


def persistent() -> Any:
    made = accuracy()
    made.persistent(True)
    return made


def collection() -> Any:
    members = {
        "a": accuracy(),
        "b": accuracy("micro"),
        "f": torchmetrics.classification.MulticlassF1Score(num_classes=3),
    }
    return torchmetrics.MetricCollection(members)


MADE: dict[str, Callable[[], Any]] = {
    "a metric": accuracy,
    "a persistent one": persistent,
    "lists of tensors": lambda: torchmetrics.classification.MulticlassAUROC(num_classes=3, thresholds=None),
    "a collection with groups": collection,
    "classes": lambda: torchmetrics.wrappers.ClasswiseWrapper(accuracy("none")),
    "the best so far": lambda: torchmetrics.wrappers.MinMaxMetric(accuracy()),
    "running": lambda: torchmetrics.wrappers.Running(accuracy(), window=3),
    "bootstrap": lambda: torchmetrics.wrappers.BootStrapper(accuracy(), num_bootstraps=3),
    "composed": lambda: accuracy() + 2 * accuracy("micro"),
}


def batch(number: int) -> tuple[Tensor, Tensor]:
    own = torch.Generator().manual_seed(number)
    return torch.rand(9, 3, generator=own).softmax(1), torch.randint(0, 3, (9,), generator=own)


def results(metric: Any, batches: range) -> list[str]:
    """Return the metric's results for further batches."""
    torch.manual_seed(5)
    return [repr((metric(*batch(number)), metric.compute())) for number in batches]


@pytest.mark.parametrize(("batches", "computed"), [(0, False), (1, False), (4, True)])
@pytest.mark.parametrize("name", MADE)
def test_a_metric_continues(name: str, batches: int, computed: bool) -> None:
    metric, other = MADE[name](), MADE[name]()
    other.update(*batch(99))
    for number in range(batches):
        metric.update(*batch(number))
    if computed:
        metric.compute()
    tree, again = Tree({"metric": metric}), Tree({"metric": other})
    restore(again, capture(tree))
    assert_same(tree, again)
    assert results(other, range(10, 12)) == results(metric, range(10, 12))
    metric.reset(), other.reset()
    assert results(other, range(20, 22)) == results(metric, range(20, 22))


def test_a_metric_inside_a_module_continues() -> None:
    first, second = Model(), Model()
    for number in range(3):
        first.metric(*batch(number))
    restore(Tree({"model": second}), capture(Tree({"model": first})))
    assert second.metric.update_count == 3
    assert results(second.metric, range(10, 12)) == results(first.metric, range(10, 12))


def test_values_between_two_walks_are_the_newest() -> None:
    """A metric replaces its states at each update; lists of tensors become longer."""
    for name in ("a metric", "lists of tensors"):
        metric, other = MADE[name](), MADE[name]()
        tree = Tree({"metric": metric})
        capture(tree)
        for number in range(3):
            metric.update(*batch(number))
            values = tree.values()
            assert tree.current is not None
            image = type(capture(tree)).of(tree.current, values)
        restore(Tree({"metric": other}), image)
        assert results(other, range(10, 12)) == results(metric, range(10, 12))


def test_configuration_of_the_program_is_kept() -> None:
    first = torchmetrics.classification.BinaryAccuracy(threshold=0.5)
    second = torchmetrics.classification.BinaryAccuracy(threshold=0.7)
    restore(Tree({"metric": second}), capture(Tree({"metric": first})))
    assert second.threshold == 0.7


def test_the_states_of_another_metric_are_refused() -> None:
    image = capture(Tree({"metric": accuracy()}))
    with pytest.raises(StateError, match="has the states"):
        restore(Tree({"metric": torchmetrics.MeanMetric()}), image)


def test_a_result_of_an_unknown_type_is_computed_again() -> None:
    class Odd(torchmetrics.MeanMetric):
        def compute(self) -> Any:
            return {1, 2}

    metric, other = Odd(), Odd()
    metric.update(1.0)
    metric.compute()
    restore(Tree({"metric": other}), capture(Tree({"metric": metric})))
    assert other.compute() == {1, 2}
