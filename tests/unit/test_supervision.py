"""The supervisor's state machine: every death and every freeze, on a clock that the test turns."""

import signal

import pytest

from diloco_cli.island_watch import START_SECONDS, State
from diloco_cli.sights import Sight
from diloco_cli.supervision import LEFTOVER_WAIT, Launch, Signal
from tests.support.supervision_world import LIMITS, PERIOD, World


def test_islands_are_launched_once_and_run() -> None:
    world = World()
    assert (world.state("a"), world.state("b")) == (State.PENDING, State.PENDING)
    assert world.turn(0.0) == [Launch("a", "first start"), Launch("b", "first start")]
    assert world.state("a") is State.STARTING
    world.silent = {"a"}
    assert world.turn() == []
    assert (world.state("a"), world.state("b")) == (State.STARTING, State.RUNNING)
    world.silent = set()
    assert world.turns(100) == []
    assert world.state("a") is State.RUNNING


def test_a_launch_that_was_not_carried_out_is_asked_for_again() -> None:
    world = World("a")
    world.auto_launch = False
    assert world.turn(0.0) == world.turn() == world.turn() == [Launch("a", "first start")]


def test_running_processes_are_adopted_not_launched() -> None:
    world = World()
    world.lives["a"], world.launches["a"] = 1, "a1"
    assert world.turn(0.0) == [Launch("b", "first start")]
    assert world.state("a") is State.RUNNING


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_preemptions_are_relaunched_without_limit(number: signal.Signals) -> None:
    world = World("a")
    world.running()
    for _ in range(10):
        world.die("a", -number)
        assert world.turn(1.0) == []
        assert world.state("a") is State.RESTARTING
        assert world.reason("a") == f"preempted by {number.name}"
        assert world.turns(65, 1.0) == [Launch("a", f"preempted by {number.name}")]
    assert world.machine.islands["a"].crashes == 0


def test_back_off_doubles_up_to_a_minute_and_is_forgotten_after_long_health() -> None:
    world = World("a")
    world.running()

    def wait() -> float:
        world.die("a", -signal.SIGKILL)
        world.turn(0.0)
        died = world.now
        while not world.turn(0.5):
            pass
        return world.now - died

    assert [wait() for _ in range(7)] == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    world.turns(700)
    assert wait() == 2.0


def test_crashes_are_counted_and_end_in_failed() -> None:
    world = World()
    world.running()
    for number in (1, 2):
        world.die("a", 1)
        assert world.turn(0.0) == []
        assert world.reason("a") == f"crashed with exit status 1, restart {number} of 2"
        assert world.turns(60) == [Launch("a", f"crashed with exit status 1, restart {number} of 2")]
        assert world.state("a") is State.RUNNING
    world.die("a", 5)
    world.turn()
    assert world.state("a") is State.FAILED
    assert "crashed 3 times, provider.max_restarts is 2" in world.reason("a")
    assert world.turns(300) == []
    assert world.machine.given_up() == ("a",)


def test_a_segmentation_fault_is_a_crash() -> None:
    world = World("a")
    world.running()
    world.die("a", -signal.SIGSEGV)
    world.turn(0.0)
    assert world.reason("a") == "crashed by SIGSEGV, restart 1 of 2"


def test_rare_crashes_do_not_add_up() -> None:
    world = World("a")
    world.running()
    for _ in range(5):
        world.die("a", 1)
        world.turns(700)
        assert world.state("a") is State.RUNNING


def test_a_wrong_configuration_is_given_up_at_once() -> None:
    world = World()
    world.running()
    world.die("b", 2)
    assert world.turns(100) == []
    assert world.state("b") is State.FAILED and "configuration" in world.reason("b")


def test_an_adopted_island_that_vanished_is_relaunched() -> None:
    world = World("a")
    world.running()
    world.die("a", None)
    world.turn(0.0)
    assert (world.state("a"), world.reason("a")) == (State.RESTARTING, "vanished")


def test_a_frozen_island_is_shown_then_replaced_and_the_other_is_left_alone() -> None:
    world = World()
    world.running()
    world.frozen = {"a"}
    assert world.turns(PERIOD * 2) == []
    assert world.state("a") is State.RUNNING, "two still reads are not three"
    world.turn()
    assert world.state("a") is State.STALE
    assert world.reason("a") == "no progress for 15 s"
    frozen_since = world.now - 15
    while not world.turn():
        pass
    assert world.log == [Signal("a", True, "no progress for 60 s")]
    assert world.now - frozen_since == LIMITS.replace_frozen_after
    assert world.turns(10) == [Launch("a", "preempted by SIGKILL")]
    assert world.state("b") is State.RUNNING


def test_a_frozen_island_that_goes_on_is_forgiven() -> None:
    world = World("a")
    world.running()
    world.frozen = {"a"}
    world.turns(55)
    assert world.state("a") is State.STALE
    world.frozen = set()
    world.turn()
    assert world.state("a") is State.RUNNING and world.log == []
    world.frozen = {"a"}
    assert world.turns(55) == [], "the count starts anew"


def test_a_frozen_learner_is_shown_and_left_to_its_agent() -> None:
    world = World("a")
    world.running()
    world.frozen_learners = {"a"}
    assert world.turns(600) == []
    assert world.state("a") is State.STALE
    assert world.reason("a").startswith("its learner made no progress for")


def test_slow_inner_steps_are_not_a_frozen_learner() -> None:
    world = World("a")
    world.step_seconds = 20.0
    world.running()
    world.frozen_learners = {"a"}
    world.turns(190)
    assert world.state("a") is State.RUNNING
    world.turns(30)
    assert world.state("a") is State.STALE


def test_reads_that_fail_count_against_nobody() -> None:
    world = World()
    world.running()
    world.frozen = {"a", "b"}
    world.reads = False
    assert world.turns(600) == []
    world.reads = True
    world.turns(10)
    assert world.state("a") is State.RUNNING
    world.turns(10)
    assert world.state("a") is State.STALE


def test_a_store_that_takes_no_writes_is_not_everyones_death() -> None:
    world = World()
    world.running()
    world.frozen, world.writes = {"a", "b"}, False  # nobody's heartbeat arrives, nor does the supervisor's own
    assert world.turns(3600) == []
    assert {world.state("a"), world.state("b")} == {State.RUNNING}
    world.frozen, world.writes = set(), True
    assert world.turns(100) == []


def test_a_supervisor_that_was_frozen_itself_starts_counting_anew() -> None:
    world = World("a")
    world.running()
    world.frozen = {"a"}
    world.turns(10)
    world.turn(1000.0)
    world.turns(10)
    assert world.state("a") is State.RUNNING
    assert world.log == []


def test_an_agent_that_never_beats_is_replaced_but_not_during_an_outage() -> None:
    world = World("a")
    world.silent = {"a"}
    world.turn(0.0)
    world.writes = False
    world.log.clear()
    assert world.turns(2 * START_SECONDS) == []
    world.writes = True
    world.turns(START_SECONDS)
    assert world.state("a") is State.STALE and "no heartbeat" in world.reason("a")
    assert world.turns(LIMITS.replace_frozen_after)[0] == Signal("a", True, world.log[0].reason)  # type: ignore[attr-defined]


def test_leftovers_of_a_dead_agent_get_a_moment_then_are_killed_before_the_launch() -> None:
    world = World("a")
    world.running()
    world.launches["a"], world.status["a"], world.others["a"] = None, -9, 2
    world.turn(0.0)
    died = world.now
    while not world.turn(0.5):
        pass
    assert world.log == [Signal("a", True, "left over from an agent that died")]
    assert world.now - died == LEFTOVER_WAIT
    assert isinstance(world.turn(0.5)[0], Launch)


def test_an_island_on_another_machine_is_known_by_its_launch() -> None:
    world = World("a")
    world.host["a"] = "rented"
    world.running()
    world.die("a", None)
    world.turn(0.0)
    assert (world.state("a"), world.reason("a")) == (State.RESTARTING, "vanished")
    assert world.turns(10, 1.0) == [Launch("a", "vanished")], "its own launch has ended: nobody is waited for"
    world.turn()
    assert world.state("a") is State.RUNNING


def test_an_island_that_may_run_elsewhere_is_not_launched_until_it_stood_still() -> None:
    world = World("a")
    world.auto_launch = False
    world.lives["a"], world.host["a"], world.launches["a"] = 1, "there", "a1"

    def look() -> list[object]:
        world.now += PERIOD
        world.machine.saw_place("a", world.now, Sight())  # nothing on this machine
        world.machine.saw_heartbeat("a", world.now, world.beat("a"), True)
        world.machine.saw_log(world.now, [], True)
        return list(world.machine.decide(world.now))

    assert [look() for _ in range(10)] == [[]] * 10
    assert world.reason("a") == "waiting: it may still run on there"
    world.frozen = {"a"}
    assert [look() for _ in range(3)] == [[], [], [Launch("a", "first start")]]


def test_a_failed_start_counts_as_a_crash() -> None:
    world = World("a")
    world.auto_launch = False
    for _ in range(3):
        while not world.turn():
            pass
        world.machine.launch_failed("a", world.now, "could not start: no memory")
    assert world.state("a") is State.FAILED
