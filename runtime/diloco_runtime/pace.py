"""How often who looks at the blackboard, and how often checkpoints are made: one set of rules, for the program and for
forecasts of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

STANDBY_POLL = 1.0
"""Most seconds between two looks of a syncer that stands by; see `standby_seconds`."""

FIRST_STEP = 0.1
"""Seconds that an inner step is taken to last before one was made."""

CHECKPOINT_SHARE = 20.0
"""A checkpoint is made at most every so many times as long as the last one took to upload: a model whose moments are
gigabytes must not spend its uplink on them."""


@dataclass(frozen=True)
class Poll:
    """Looks in proportion to a period. The longer nothing happens, the less exactly its end needs to be known: a run
    that stands still is looked at rarely."""

    per_period: float
    """Looks within one period, or within the time since the last news if that is longer."""
    fastest: float
    """Least seconds between two looks."""
    slowest: float

    def seconds(self, period: float, quiet: float = 0.0) -> float:
        """Return the pause between two looks. `quiet`: seconds since the last news."""
        return min(self.slowest, max(self.fastest, max(period, quiet) / self.per_period))


LEARNER_POLL = Poll(10.0, 0.02, 1.0)
"""A learner's follower: a call is noticed within a tenth of a fragment period."""

DUTY_POLL = Poll(20.0, 0.02, 0.5)
"""The syncer on duty."""


def learner_period(step_seconds: float | None, steps: float, commit_seconds: float | None) -> float:
    """Return the fragment period that a learner's polls go by: its own (`steps` inner steps), or the run's if commits
    come faster. The fastest learner calls, and a slow one that looked at its own pace would hear of it too late."""
    own = (step_seconds or FIRST_STEP) * steps
    return own if commit_seconds is None else min(own, commit_seconds)


def standby_seconds(heartbeat_every: float) -> float:
    """Return the pause between two looks of a syncer that stands by: it has to move on with every heartbeat, or others
    count its standing counter as a syncer that hangs, and it counts each of its own pauses as one of being away."""
    return min(STANDBY_POLL, heartbeat_every)


def duty_seconds(period: float, quiet: float, heartbeat_every: float) -> float:
    """Return the pause between two looks of the syncer on duty. `period`: seconds between commits; `quiet`: seconds
    since the last one. At least one with every heartbeat, for the same reason."""
    return min(DUTY_POLL.seconds(period, quiet), heartbeat_every)


def checkpoint_seconds(least: float, took: float) -> float:
    """Return the seconds between two checkpoints. `least`: as configured; `took`: the upload of the last one."""
    return max(least, CHECKPOINT_SHARE * took)
