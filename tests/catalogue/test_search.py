"""Every order of the requests of some processes, on models of a folder, of an object store and of NFS, each
killed at any request. The invariants: invariants.py. A fault is shown with its shortest schedule.
"""

import pytest

from tests.catalogue.model import POSIX, S3, Store
from tests.catalogue.mutations import MUTATIONS, Mutation
from tests.catalogue.scenarios import SCENARIOS, Scenario

# Of less than two seconds each.
SHORT = {
    ("first start", "folder"),
    ("deposed leader", "folder"),
    ("keepers", "folder"),
    ("start adopts", "nfs"),
    ("backup", "objects"),
    ("frozen file twice", "nfs"),
    ("no version", "folder"),
    ("old home, newer mirror", "folder"),
}
SHORT_MUTATIONS = {"start adopts", "first start", "backup", "frozen file twice", "old home, newer mirror"}


def _searches() -> list[object]:
    return [
        pytest.param(
            scenario,
            store,
            id=f"{scenario.name}-{store.name}",
            marks=[] if (scenario.name, store.name) in SHORT else pytest.mark.long,
        )
        for scenario in SCENARIOS.values()
        for store in scenario.stores
    ]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("scenario", "store"), _searches())
def test_every_order_keeps_the_invariants(scenario: Scenario, store: Store) -> None:
    found = scenario.search(store).run()
    assert found.states > 100
    assert not found.fault, f"{scenario.name} on {store.name}: {found.fault}"


def _mutations() -> list[object]:
    return [
        pytest.param(
            each,
            id=each.name,
            marks=[] if each.scenario in SHORT_MUTATIONS else pytest.mark.long,
        )
        for each in MUTATIONS
    ]


@pytest.mark.parametrize("mutation", _mutations())
def test_each_rule_is_needed(mutation: Mutation) -> None:
    fault = mutation.explore().fault
    assert fault.startswith(mutation.violates), fault or "no invariant is violated"


@pytest.mark.parametrize("store", [POSIX, S3], ids=lambda store: store.name)
@pytest.mark.parametrize(
    "name",
    [
        "frozen file twice",
        *(
            pytest.param(each, marks=pytest.mark.long)
            for each in ("backup", "frozen file dropped", "start adopts", "keepers")
        ),
    ],
)
def test_merging_of_states_loses_none(name: str, store: Store) -> None:
    """A search that tells processes apart by all answers that they were given reaches the same ends."""
    merged, every = (SCENARIOS[name].search(store, by_answers=by_answers) for by_answers in (False, True))
    found, wanted = merged.run(), every.run()
    assert not found.fault, found.fault
    assert not wanted.fault, wanted.fault
    assert merged.ends() == every.ends()
    assert found.states < wanted.states
