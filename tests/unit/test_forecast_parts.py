"""The parts of a forecast by themselves: virtual time, links, losses, and constants shared with the runtime."""

from __future__ import annotations

import math

import pytest

from diloco_cli.simulation.forecast_events import Body, Link, Nap, Process, Timeline, Transfer
from diloco_cli.simulation.forecast_failures import RandomLosses


def test_transfers_share_a_link_equally() -> None:
    timeline, ended = Timeline(), {}
    link = Link(timeline, 100.0)

    def body(name: str, size: float) -> Body:
        yield Transfer(link, size, 0.5)
        ended[name] = timeline.now

    Process(timeline, body("small", 100.0))
    Process(timeline, body("large", 300.0))
    while timeline.next_time() < math.inf:
        timeline.step()
    # Both get 50 per second for 2 s, then the large one has the link to itself for its last 200 bytes.
    assert ended == {"small": 2.5, "large": 4.5}
    assert link.moved == 400.0


def test_a_nap_ends_early_and_only_once() -> None:
    timeline, woke = Timeline(), []

    def body() -> Body:
        yield Nap(10.0)
        woke.append(timeline.now)
        yield 5.0
        woke.append(timeline.now)

    process = Process(timeline, body())
    process.wake(1.0)
    process.wake(2.0)
    while timeline.next_time() < math.inf:
        timeline.step()
    assert woke == [1.0, 6.0] and not process.alive


def test_the_mean_time_between_losses_is_the_assumed_one() -> None:
    losses = RandomLosses({"a": 2.0, "b": 0.0}, seed=3)
    now, count = 0.0, 2000
    for _ in range(count):
        losses.started("a", now)
        losses.started("b", now)
        now = losses.pop().at
    assert losses.next_time() == math.inf, "b is never lost"
    assert now / count == pytest.approx(7200.0, rel=0.07)
