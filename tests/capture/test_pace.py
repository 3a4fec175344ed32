"""The capture schedule as a pure function of the times that the test passes."""

import pytest

from flashckpt.capture.schedule import Budget, Intervals, Pace


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def run(budget: Budget, steps: int, plain_s: float, cost_s: float) -> int:
    """Run a loop whose iterations take `plain_s`, and `cost_s` more with a snapshot; return the snapshots
    taken."""
    taken = 0
    for _ in range(steps):
        if budget.allows():
            budget.taken(ordered=False)
            budget.burdened(plain_s + cost_s, 0.0, ordered=False)
            taken += 1
        else:
            budget.plain(plain_s)
    return taken


def begun(plain_s: float) -> Budget:
    """The budget of a loop whose first iterations are over."""
    budget = Budget(0.01)
    for _ in range(5):
        budget.plain(plain_s)
    return budget


@pytest.mark.parametrize("cost_s", [0.001, 0.01, 2.0])
def test_the_cost_of_captures_stays_within_the_share(cost_s: float) -> None:
    steps, plain_s = 20_000, 0.1
    budget = begun(plain_s)
    taken = run(budget, steps, plain_s, cost_s)
    loop_s = steps * plain_s + taken * cost_s
    assert taken * cost_s <= 0.01 * loop_s + 2 * cost_s  # the first is the measurement
    if cost_s > 0.001:
        assert taken * cost_s >= 0.0095 * loop_s - 2 * cost_s  # and the share is used
    else:
        assert taken > 0.95 * steps  # at most every step


def test_a_free_snapshot_is_taken_at_every_step_but_for_a_few_that_measure() -> None:
    budget = Budget(0.01)
    assert run(budget, 1000, 0.1, 0.0) >= 970


def test_work_done_once_does_not_count_as_cost() -> None:
    """The first capture makes the plan."""
    clock = Clock()
    budget = Budget(0.01)
    intervals = Intervals(budget, (), clock)
    for _ in range(4):
        clock.now_s += 0.1
        intervals.boundary(trailing=False)
    budget.taken(ordered=False)
    intervals.captured(0.002, ordered=False, once_s=0.5)
    clock.now_s += 0.602
    intervals.boundary(trailing=False)
    assert budget.cost_s == pytest.approx(0.002)


def test_a_slower_loop_does_not_count_as_cost_for_ever() -> None:
    budget = Budget(0.01)
    run(budget, 500, 0.1, 0.0005)
    assert run(budget, 3000, 0.3, 0.0005) >= 2000


def test_one_long_pause_does_not_stop_captures() -> None:
    budget = Budget(0.01)
    run(budget, 500, 0.1, 0.01)
    budget.taken(ordered=False)
    budget.burdened(60.0, 0.0, ordered=False)  # a validation in that iteration
    assert run(budget, 200, 0.1, 0.01) >= 10


@pytest.mark.parametrize("odd_s", [20.0, 300.0])
def test_one_outlier_as_first_measurement_does_not_stop_captures(odd_s: float) -> None:
    """A recompile or a validation in the first iteration with a snapshot of a device, where the call gives no
    bound."""
    budget = begun(0.2)
    budget.taken(ordered=False)
    budget.burdened(odd_s, 0.0, ordered=False)
    assert not budget.allows()
    assert run(budget, int(max(odd_s, 60.0) / 0.2) + 2000, 0.2, 0.01) >= 100


def test_an_expensive_snapshot_is_measured_at_most_three_times() -> None:
    """A doubtful cost is measured again with bounded frequency, and paid back later."""
    assert run(begun(0.2), 5 * 600, 0.2, 20.0) == 3


def test_a_host_copy_is_charged_at_least_its_own_time_and_not_measured_again() -> None:
    budget = begun(0.1)
    budget.taken(ordered=False)
    budget.burdened(0.1, 0.02, ordered=False)
    assert budget.cost_s == pytest.approx(0.02)
    budget = begun(0.2)
    budget.taken(ordered=False)
    budget.burdened(20.2, 20.0, ordered=False)
    assert run(budget, 5 * 600, 0.2, 20.0) == 0


def test_a_copy_that_outlasts_its_iteration_is_charged_further() -> None:
    def allowed(trailing_s: float) -> int:
        budget = Budget(0.01)
        run(budget, 100, 0.1, 0.01)
        for _ in range(5):
            budget.trailing(trailing_s)
        return run(budget, 100, 0.1, 0.01)

    assert allowed(0.11) < allowed(0.1)


def test_ordered_snapshots_are_not_charged() -> None:
    budget = Budget(0.01)
    run(budget, 100, 0.1, 0.01)
    before = run(budget, 50, 0.1, 0.01)
    for _ in range(20):
        budget.taken(ordered=True)
        budget.burdened(0.11, 0.0, ordered=True)
    assert run(budget, 50, 0.1, 0.01) >= before - 1


def test_a_number_of_steps_is_an_order_that_stays_due() -> None:
    pace = Pace(3)
    assert [step for step in range(1, 6) if pace.due(step)] == [3, 4, 5]
    pace.captured(ordered=False)
    assert [step for step in range(6, 7) if pace.due(step)] == [6]
    pace.captured(ordered=False)
    assert not pace.due(7)
    pace.lost()
    assert pace.due(8)


def test_none_captures_only_on_order() -> None:
    pace = Pace(None)
    assert not any(pace.due(step) for step in range(1, 100))
    pace.lost()
    assert not pace.due(100)


def test_persisting_by_steps_makes_a_capture_due() -> None:
    pace = Pace(None, 4)
    assert [step for step in range(1, 6) if pace.due(step)] == [4, 5]
    assert pace.persist_due(5)
    pace.persist_asked()
    assert not pace.due(8)  # one unfulfilled request at a time, and this one stays due
    pace.persist_ended(fulfilled=True)
    assert pace.due(9)
    assert pace.persist_due(9)


def test_persisting_by_time() -> None:
    clock = Clock()
    pace = Pace("auto", "5min", clock=clock)
    assert not pace.persist_due(1)
    clock.now_s = 301
    assert pace.persist_due(2)
    pace.persist_asked()
    clock.now_s = 700
    assert not pace.persist_due(3)
    pace.persist_ended(fulfilled=True)
    assert pace.persist_due(4)
    pace.persist_asked()
    pace.persist_ended(fulfilled=False)
    assert pace.persist_due(5)  # one that failed is tried again with the next snapshot


@pytest.mark.parametrize(("interval", "patience_s"), [("1min", 600), ("10min", 1200)])
def test_a_request_that_is_never_answered_does_not_stop_the_next(interval: str, patience_s: int) -> None:
    """Slot and keeper may be gone together, so that the result stays unknown."""
    clock = Clock()
    pace = Pace("auto", interval, clock=clock)
    clock.now_s = start_s = 1000.0
    assert pace.persist_due(1)
    pace.persist_asked()
    clock.now_s = start_s + patience_s - 1
    assert not pace.persist_due(2)
    clock.now_s = start_s + patience_s
    assert pace.persist_due(3)
    pace.persist_asked()
    assert not pace.persist_due(4)
    pace.persist_ended(fulfilled=True)
    assert not pace.persist_due(5)


def test_with_a_cache_what_falls_due_while_the_home_is_busy_goes_there_alone() -> None:
    now = [0.0]
    pace = Pace(None, "10s", has_cache=True, clock=lambda: now[0])
    now[0] = 10.0
    assert pace.persist_due(1)
    assert pace.persists_home
    pace.persist_asked(home=True)
    now[0] = 20.0
    assert pace.persist_due(2)
    assert not pace.persists_home
    pace.persist_asked(home=False)
    assert not pace.persist_due(3), "the interval begins anew"
    pace.persist_ended(fulfilled=True)
    assert pace.persist_due(4), "the home is free, and is behind the cache"
    assert pace.persists_home
    pace.persist_asked(home=True)
    pace.persist_ended(fulfilled=True)
    assert not pace.persist_due(5)
