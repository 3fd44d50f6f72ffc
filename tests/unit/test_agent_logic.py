"""What an agent does about its children: restart, kill what hangs, give up, leave in order."""

from __future__ import annotations

import signal

import pytest

from diloco_runtime.agent_logic import (
    END_PATIENCE,
    FIRST_PAUSE,
    HEALTHY_AFTER,
    HUNG_AFTER,
    HUNG_STEPS,
    LONGEST_PAUSE,
    LOOK_GAP,
    MAX_CRASHES,
    MAX_KILLS,
    START_LIMIT,
    Act,
    AgentLogic,
    Child,
)
from diloco_runtime.launch import Exit

SIGKILL = -9


class Agent:
    """The driver around the logic: carries out what it decides, on a clock of its own."""

    def __init__(self) -> None:
        self.logic = AgentLogic()
        self.now = 0.0
        self.turns = {"learner": 0, "syncer": 0}
        self.lively: set[Child] = {"learner", "syncer"}
        """Children whose main loop turns."""

    def decide(self, step_seconds: float | None = None) -> list[Act]:
        acts = self.logic.decide(self.now, step_seconds)
        for act in acts:
            if act.kind == "start" and act.child is not None:
                self.logic.on_started(act.child, self.now)
        return acts

    def exit(self, child: Child, code: int, last_words: str = "") -> None:
        self.logic.on_exit(child, code, self.now, last_words)

    def live(self, seconds: float, step_seconds: float | None = None) -> list[tuple[float, Act]]:
        """Let time pass in looks of a second; return what was decided when."""
        acts, end = [], self.now + seconds
        while self.now < end:
            self.now += 1.0
            for child in self.lively:
                self.turns[child] += 1
                self.logic.on_ticks(child, self.turns[child], self.now)
            acts += [(self.now, act) for act in self.decide(step_seconds)]
        return acts


@pytest.fixture
def agent() -> Agent:
    """Return an agent with both children running for a while."""
    made = Agent()
    assert made.decide() == [Act("start", "learner"), Act("start", "syncer")]
    assert made.live(HEALTHY_AFTER + 5.0) == []
    return made


# ---- restarts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("child", ["learner", "syncer"])
@pytest.mark.parametrize("code", [1, 5, 6, SIGKILL])
def test_what_dies_is_started_again(agent: Agent, child: Child, code: int) -> None:
    agent.exit(child, code)
    assert agent.decide() == []
    died = agent.now
    assert agent.live(10.0) == [(died + FIRST_PAUSE, Act("start", child))]
    assert agent.logic.restarts == (1 if child == "learner" else 0)


def test_pauses_double_while_a_child_crashes_in_a_row(agent: Agent) -> None:
    pauses = []
    for _ in range(MAX_KILLS - 1):
        agent.exit("learner", SIGKILL)
        died = agent.now
        (started, act), *more = agent.live(LONGEST_PAUSE + 1.0)
        assert act == Act("start", "learner") and not more
        pauses.append(started - died)
        agent.now = started
    assert pauses == [min(LONGEST_PAUSE, FIRST_PAUSE * 2**n) for n in range(MAX_KILLS - 1)]


def test_a_child_that_lived_has_recovered(agent: Agent) -> None:
    for _ in range(5 * MAX_CRASHES):
        agent.exit("learner", 1)
        assert [act for _, act in agent.live(FIRST_PAUSE)] == [Act("start", "learner")]
        assert agent.live(HEALTHY_AFTER) == []
    assert agent.logic.restarts == 5 * MAX_CRASHES


@pytest.mark.parametrize(("code", "limit"), [(1, MAX_CRASHES), (SIGKILL, MAX_KILLS)])
def test_an_island_gives_up_on_a_child_that_always_dies(agent: Agent, code: int, limit: int) -> None:
    agent.exit("syncer", code)
    for _ in range(limit - 1):
        assert Act("start", "syncer") in [act for _, act in agent.live(LONGEST_PAUSE)[:1]]
        agent.logic.on_started("syncer", agent.now)
        agent.exit("syncer", code)
    assert agent.decide() == [Act("kill", "learner")], "what still runs goes first"
    agent.exit("learner", SIGKILL)
    (act,) = agent.decide()
    assert (act.kind, act.code) == ("exit", Exit.GAVE_UP)
    assert f"the syncer ended {limit} times in a row" in act.reason and "log" in act.reason


def test_the_crashes_of_one_child_are_not_the_others(agent: Agent) -> None:
    for child in ("learner", "syncer"):
        for _ in range(MAX_CRASHES - 1):
            agent.exit(child, 1)
            agent.logic.on_started(child, agent.now)
    assert all(act.kind != "exit" for act in agent.decide())


@pytest.mark.parametrize("child", ["learner", "syncer"])
def test_why_a_child_failed_is_known_until_it_has_got_going_again(agent: Agent, child: Child) -> None:
    agent.exit(child, 1, "x is gone")
    agent.lively = set()
    agent.logic.on_ticks(child, 7, agent.now)  # the file of the life that has ended
    assert agent.live(FIRST_PAUSE + 1.0) and agent.logic.last_words(child) == "x is gone"
    agent.logic.on_ticks(child, 0, agent.now)  # starting
    assert agent.logic.last_words(child) == "x is gone"
    agent.logic.on_ticks(child, 1, agent.now)
    assert agent.logic.last_words(child) == ""


@pytest.mark.parametrize(("code", "times"), [(Exit.CRASHED, MAX_CRASHES), (Exit.CONFIG, 1)])
def test_an_island_that_gives_up_says_why(agent: Agent, code: int, times: int) -> None:
    for _ in range(times):
        agent.logic.on_started("learner", agent.now)
        agent.exit("learner", code, "x is gone")
    agent.exit("syncer", SIGKILL)
    (act,) = agent.decide()
    assert act.kind == "exit" and act.reason.endswith(f"exit code {code}: x is gone")


# ---- hanging --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("child", ["learner", "syncer"])
def test_a_child_whose_loop_does_not_turn_is_killed_once(agent: Agent, child: Child) -> None:
    agent.lively = {"learner", "syncer"} - {child}
    stood = agent.now
    ((when, act),) = agent.live(3 * HUNG_AFTER)
    assert (when, act.kind, act.child) == (stood + HUNG_AFTER + 1.0, "kill", child)
    assert f"{HUNG_AFTER + 1:.0f} s" in act.reason
    agent.exit(child, SIGKILL)
    assert Act("start", child) in [act for _, act in agent.live(FIRST_PAUSE)]


def test_a_learner_with_long_steps_has_more_time_and_the_syncer_has_not(agent: Agent) -> None:
    agent.lively = set()
    stood, step = agent.now, HUNG_AFTER / 10.0
    killed = [(when - stood, act.child) for when, act in agent.live(HUNG_STEPS * step + 5.0, step_seconds=step)]
    assert killed == [(HUNG_AFTER + 1.0, "syncer"), (HUNG_STEPS * step + 1.0, "learner")]


def test_a_start_may_take_longer(agent: Agent) -> None:
    agent.exit("learner", 1)
    agent.lively = {"syncer"}
    ((started, act),) = agent.live(FIRST_PAUSE)
    assert act == Act("start", "learner")
    agent.logic.on_ticks("learner", 0, started)
    ((when, act),) = agent.live(START_LIMIT + 1.0)
    assert (when, act.kind, act.child) == (started + START_LIMIT + 1.0, "kill", "learner")


def test_an_agent_that_was_frozen_does_not_blame_its_children(agent: Agent) -> None:
    agent.lively = set()
    agent.live(HUNG_AFTER - 1.0)
    agent.now += LOOK_GAP + 1.0
    assert agent.decide() == []
    thawed = agent.now
    killed = agent.live(HUNG_AFTER + 2.0)
    assert [when - thawed for when, _ in killed] == [HUNG_AFTER + 1.0] * 2, "and its patience starts anew"


# ---- the end --------------------------------------------------------------------------------------------------------


def test_the_island_is_done_when_both_children_are(agent: Agent) -> None:
    agent.exit("learner", Exit.DONE)
    assert agent.live(60.0) == [], "a child that is done is not started again"
    agent.exit("syncer", Exit.DONE)
    assert agent.decide() == [Act("exit", code=Exit.DONE, reason="the run is over")]


@pytest.mark.parametrize("code", [Exit.FENCED, Exit.RUN_GONE, Exit.CONFIG])
@pytest.mark.parametrize("child", ["learner", "syncer"])
def test_what_a_child_found_out_ends_the_island(agent: Agent, child: Child, code: Exit) -> None:
    other: Child = "syncer" if child == "learner" else "learner"
    agent.exit(child, code)
    assert agent.decide() == [Act("kill", other)]
    agent.exit(other, SIGKILL)
    (act,) = agent.decide()
    assert (act.kind, act.code) == ("exit", code) and child in act.reason


def test_the_first_verdict_stands(agent: Agent) -> None:
    agent.logic.on_verdict(Exit.FENCED, "a newer life")
    agent.exit("learner", Exit.CONFIG)
    agent.logic.on_verdict(Exit.RUN_GONE, "purged")
    assert agent.decide() == [Act("kill", "syncer")]
    agent.exit("syncer", SIGKILL)
    assert agent.decide() == [Act("exit", code=Exit.FENCED, reason="a newer life")]


def test_a_verdict_kills_both_and_is_repeated_until_they_are_gone(agent: Agent) -> None:
    agent.logic.on_verdict(Exit.RUN_GONE, "purged")
    for _ in range(3):
        assert agent.decide() == [Act("kill", "learner"), Act("kill", "syncer")]
    agent.exit("learner", SIGKILL)
    assert agent.decide() == [Act("kill", "syncer")]


def test_leaving_ends_the_learner_before_the_syncer(agent: Agent) -> None:
    assert not agent.logic.leaving
    agent.logic.on_terminate()
    assert agent.logic.leaving
    assert agent.decide() == agent.decide() == [Act("terminate", "learner")]
    agent.exit("learner", Exit.LEFT)
    assert agent.decide() == [Act("terminate", "syncer")]
    agent.exit("syncer", Exit.LEFT)
    assert agent.decide() == [Act("exit", code=Exit.LEFT, reason="told to leave")]


def test_who_leaves_starts_nothing_again(agent: Agent) -> None:
    agent.exit("learner", SIGKILL)
    agent.logic.on_terminate()
    agent.now += 100.0
    assert agent.decide() == [Act("terminate", "syncer")]
    agent.exit("syncer", SIGKILL)
    assert [act.code for act in agent.decide()] == [Exit.LEFT]


def test_a_verdict_is_stronger_than_leaving(agent: Agent) -> None:
    agent.logic.on_terminate()
    agent.logic.on_verdict(Exit.FENCED, "a newer life")
    assert [act.kind for act in agent.decide()] == ["kill", "kill"]


# ---- the end, and what comes after it -------------------------------------------------------------------------------


def test_a_learner_that_left_at_the_end_comes_back_when_the_run_goes_on(agent: Agent) -> None:
    agent.exit("learner", Exit.DONE)
    assert agent.live(10.0) == []
    agent.logic.on_reopened()
    assert agent.decide() == [Act("start", "learner")]
    assert agent.logic.restarts == 0, "it did not crash"


@pytest.mark.parametrize("code", [Exit.LEFT, -signal.SIGTERM])
def test_a_learner_that_does_not_see_the_end_is_told_to_leave(agent: Agent, code: int) -> None:
    """The run was reopened and stopped again before its next commit: only the syncer knows that it is over."""
    agent.exit("syncer", Exit.DONE)
    agent.lively = {"learner"}
    first, act = agent.live(END_PATIENCE + 5.0)[0]
    assert act == Act("terminate", "learner") and first >= END_PATIENCE
    agent.exit("learner", code)  # by the signal itself when it was still starting
    (act,) = agent.decide()
    assert (act.kind, act.code) == ("exit", Exit.DONE)


def test_what_stands_still_is_told(agent: Agent) -> None:
    agent.lively = {"learner"}
    agent.live(20.0)
    still = agent.logic.still(agent.now + 0.5)
    assert still == {"learner": 0.5, "syncer": 20.5}
    agent.exit("syncer", 1)
    assert agent.logic.still(agent.now).keys() == {"learner"}
