"""The supervisor's state machine at the end of a run: drains, stop requests, stalls, reopened runs."""

import signal

from diloco_cli.island_watch import State
from diloco_cli.supervision import END_WAIT, LEAVE_WAIT, End, Launch, Signal, StopRun
from tests.support.supervision_world import LIMITS, PERIOD, World, control


def test_nobody_is_relaunched_once_the_log_drains() -> None:
    world = World()
    world.running()
    world.commit("a", "b", phase="drain")
    world.turn()
    world.die("b", -signal.SIGKILL)
    assert world.turns(300) == []
    assert world.state("b") is State.RESTARTING


def test_when_nobody_is_left_to_finish_the_drain_one_comes_back() -> None:
    world = World()
    world.running()
    world.commit("a", "b", phase="drain", successor="b")
    world.turn()
    world.die("a", 0)
    world.die("b", -signal.SIGKILL)
    assert world.turns(20) == [Launch("b", "preempted by SIGKILL")]
    assert world.state("a") is State.DONE


def test_the_final_commit_ends_supervision_when_all_have_left() -> None:
    world = World()
    world.running()
    world.commit(phase="final", reason="budget")
    assert world.turn() == []
    world.die("a", 0)
    assert world.turn() == []
    assert world.state("a") is State.DONE
    world.die("b", 0)
    assert world.turn() == [End("budget", "the budget is reached")]


def test_islands_that_do_not_leave_after_the_end_are_asked_then_forced() -> None:
    world = World("a")
    world.running()
    world.commit(phase="final", reason="budget")
    world.turn(0.0)
    began = world.now
    world.frozen = {"a"}
    assert world.turns(END_WAIT - 1, 1.0) == []
    first = world.turn(1.0)
    assert first == [Signal("a", False, "still there after the final commit")]
    while not any(isinstance(action, Signal) and action.force for action in world.turn(1.0)):
        pass
    assert world.now - began == END_WAIT + LEAVE_WAIT
    assert world.turn(1.0) == [End("budget", "the budget is reached")]


def test_a_stop_request_forbids_every_launch_and_ends_when_all_are_gone() -> None:
    world = World()
    world.running()
    world.machine.saw_control(control(1, "stop"))
    world.die("a", -signal.SIGTERM)
    assert world.turns(100) == []
    assert world.state("a") is State.DOWN
    world.die("b", 6)
    assert world.turn() == [End("stopped", "a stop was requested")]


def test_a_stop_before_the_first_launch_launches_nobody() -> None:
    world = World()
    world.machine.saw_control(control(1, "stop"))
    assert world.turn(0.0) == [End("stopped", "a stop was requested")]


def test_a_finished_run_that_is_reopened_brings_everybody_back() -> None:
    world = World()
    world.commit(phase="final", reason="budget", control=1)
    world.machine.saw_control(control(1, "stop"))
    world.machine.saw_control(control(2, "run"))
    assert world.turn(0.0) == [Launch("a", "first start"), Launch("b", "first start")]
    world.turn()
    world.die("a", 0)
    assert world.turn(0.5) == [Launch("a", "the run was reopened")], "it had not seen the request yet"


def test_an_island_that_ended_comes_back_when_the_run_goes_on() -> None:
    world = World()
    world.running()
    world.die("a", 0)
    world.turn()
    assert world.state("a") is State.DONE
    world.commit("b")
    assert world.turns(20) == [Launch("a", "the run was reopened")]


def test_when_every_island_is_given_up_supervision_ends_with_the_reasons() -> None:
    world = World()
    world.running()
    world.die("a", 2)
    world.die("b", 2)
    (end,) = world.turn()
    assert isinstance(end, End) and end.outcome == "given up"
    assert "a: its configuration" in end.reason and "b: its configuration" in end.reason


def test_a_run_without_commits_is_stopped_once() -> None:
    world = World()
    world.commit("a", "b")
    world.running()
    stops = [action for action in world.turns(LIMITS.stalled_after + 20) if isinstance(action, StopRun)]
    assert stops and "provider.stalled_after" in stops[0].reason
    world.machine.stop_sent()
    assert world.turns(50) == []


def test_time_in_which_the_store_is_out_is_no_stall() -> None:
    world = World()
    world.commit("a", "b")
    world.running()
    world.writes = False
    assert world.turns(3 * LIMITS.stalled_after) == []


def test_an_island_in_no_commit_is_given_up_while_the_others_go_on() -> None:
    world = World()
    world.commit("a", "b")
    world.running()
    signals: list[object] = []
    for _ in range(round(LIMITS.stalled_after / PERIOD) + 5):
        world.commit("a")
        signals += world.turn()
    assert world.state("b") is State.FAILED and "commits were made without it" in world.reason("b")
    assert signals[0] == Signal("b", False, world.reason("b"))
    assert world.state("a") is State.RUNNING
