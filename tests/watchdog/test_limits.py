"""How long a step may take, by the steps before it, and which of them was too slow."""

import pytest

from flashckpt import OptionError, Options
from flashckpt.capture.slot_writer import HeartbeatWriter
from flashckpt.checkpointer.run_log import StepTimes, Watch
from flashckpt.persist.ledger import Event


def steps(*lengths: float, first: int = 1) -> list[tuple[int, float]]:
    return list(enumerate(lengths, start=first))


def history(*lengths: float) -> StepTimes:
    times = StepTimes()
    times.add(steps(*lengths))
    return times


@pytest.mark.parametrize(
    ("lengths", "reports_s", "kills_s"),
    [
        ([], 3600, 3600),
        ([900.0], 3600, 3600),  # a long compilation, and nothing known
        ([2000.0], 6000, 6000),
        ([0.1] * 500, 600, 3600),
        ([60.0] * 500, 1800, 3600),
        ([600.0] * 500, 18000, 18000),
        ([0.1] * 500 + [1800.0], 5400, 5400),  # a validation of half an hour
        ([1800.0] + [0.1] * 1024, 600, 3600),  # it is forgotten in the end
    ],
)
def test_patience_follows_from_the_steps(lengths: list[float], reports_s: float, kills_s: float) -> None:
    times = history(*lengths)
    assert times.timeout_s(kills=False) == reports_s
    assert times.timeout_s(kills=True) == kills_s


def test_a_step_far_beyond_its_history_is_slow_and_others_are_not() -> None:
    times = history(*[0.2] * 50)
    assert times.add(steps(0.9, 1.9, first=51)) == [], "not beyond a second, not beyond ten times the usual"
    [slow] = times.add(steps(0.2, 4.5, 0.2, first=53))
    assert (slow.step, slow.seconds, slow.usual_s) == (54, 4.5, 0.2)
    assert StepTimes().add(steps(0.1, 60.0, 0.1)) == [], "nothing is, before enough is known"


def test_what_comes_again_and_again_is_slow_the_first_times_only() -> None:
    times, found = StepTimes(), []
    for epoch in range(6):
        validation = steps(*[0.1] * 99, 30.0, first=100 * epoch + 1)
        found += [slow.step for slow in times.add(validation)]
    assert found == [100, 200]


def watch(options: Options) -> tuple[Watch, HeartbeatWriter, list[dict[str, object]], list[float]]:
    heartbeat, told, now = HeartbeatWriter({}), [], [0.0]

    def tell(event: Event, **fields: object) -> None:
        told.append({"event": event, **fields})

    return Watch(heartbeat, options, tell, clock=lambda: now[0]), heartbeat, told, now


def test_slow_steps_are_told_at_once_and_then_once_a_minute() -> None:
    made, heartbeat, told, now = watch(Options())
    heartbeat.lengths.extend(steps(*[0.1] * 40, 5.0))
    made.poll()
    assert [(each["step"], each["count"]) for each in told] == [(41, 1)]
    heartbeat.lengths.extend(steps(11.0, 25.0, 11.0, first=42))
    made.poll()
    assert len(told) == 1
    now[0] += 60
    made.poll()
    assert [(each["step"], each["count"]) for each in told] == [(41, 1), (43, 2)]
    heartbeat.lengths.extend(steps(*[0.1] * 20, 90.0, first=45))
    made.poll(last=True)
    assert told[-1]["step"] == 65, "what is left is told when the run is let go"


@pytest.mark.parametrize(
    ("options", "patience_s"),
    [
        (Options(watchdog="90s"), 90.0),
        (Options(watchdog="90s", watchdog_action="kill"), 90.0),
        (Options(watchdog=None), 0.0),
        (Options(), 600.0),
        (Options(watchdog_action="kill"), 3600.0),
    ],
)
def test_the_heartbeat_has_the_patience_that_was_asked_for(options: Options, patience_s: float) -> None:
    made, heartbeat, _, _ = watch(options)
    heartbeat.lengths.extend(steps(*[0.1] * 40))
    made.poll()
    assert heartbeat.timeout_s == patience_s


@pytest.mark.parametrize("wrong", [{"watchdog": "0s"}, {"watchdog": "soon"}, {"watchdog_action": "end"}])
def test_options_that_mean_nothing_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(OptionError):
        Options(**wrong)  # type: ignore[arg-type]
