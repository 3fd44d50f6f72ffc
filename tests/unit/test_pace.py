"""How often who looks: in proportion, within bounds, and ever more rarely while nothing happens."""

from __future__ import annotations

import pytest

from diloco_runtime.pace import DUTY_POLL, LEARNER_POLL, checkpoint_seconds, learner_period


@pytest.mark.parametrize(
    ("period", "quiet", "learner", "duty"),
    [
        (0.0, 0.0, 0.02, 0.02),
        (4.0, 0.0, 0.4, 0.2),
        (4.0, 3.0, 0.4, 0.2),
        (4.0, 6.0, 0.6, 0.3),
        (1000.0, 0.0, 1.0, 0.5),
        (0.1, 1000.0, 1.0, 0.5),
    ],
)
def test_polls_are_a_share_of_the_period_or_of_the_silence(
    period: float, quiet: float, learner: float, duty: float
) -> None:
    assert LEARNER_POLL.seconds(period, quiet) == pytest.approx(learner)
    assert DUTY_POLL.seconds(period, quiet) == pytest.approx(duty)


def test_a_learner_looks_at_its_own_pace_or_at_the_runs_if_that_is_faster() -> None:
    assert learner_period(2.0, 4, None) == 8.0
    assert learner_period(2.0, 4, 3.0) == 3.0
    assert learner_period(2.0, 4, 30.0) == 8.0
    assert learner_period(None, 4, None) == pytest.approx(0.4), "before its first step"


def test_checkpoints_of_a_large_model_take_a_bounded_share_of_the_uplink() -> None:
    assert checkpoint_seconds(60.0, 1.0) == 60.0
    assert checkpoint_seconds(60.0, 64.0) == 1280.0
