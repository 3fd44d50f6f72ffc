"""What an agent decides about its two children: start, restart, kill, give up, leave. Pure; times are passed in."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from diloco_runtime.launch import Exit

Child = Literal["learner", "syncer"]

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds before a crashed child is started again; doubled with each crash in a row."""

HEALTHY_AFTER = 20.0
"""A child that lived this long has recovered: its crashes in a row are forgotten."""

MAX_CRASHES, MAX_KILLS = 6, 20
"""Ends in a row after which an island gives up: by the child's own exit code (what always fails will fail again), and
by a signal (memory that ran out for a moment, an operator)."""

HUNG_AFTER = 120.0
"""Seconds without a turn of its main loop after which a learner or syncer is killed and started again."""

HUNG_STEPS = 30.0
"""... or this many of the learner's own inner steps, when they are long."""

START_LIMIT = 900.0
"""Seconds that a child may take to its first turn: imports, downloads, building a model."""

END_PATIENCE = 60.0
"""Seconds that a learner has to see the end of the run for itself after the syncer has seen it."""

LOOK_GAP = 10.0
"""An agent that has not looked for so long was itself stopped: its patience starts anew."""


@dataclass(frozen=True)
class Act:
    """Something for the driver to do."""

    kind: Literal["start", "kill", "terminate", "exit"]
    child: Child | None = None
    code: Exit = Exit.DONE
    reason: str = ""


@dataclass
class _State:
    running: bool = False
    done: bool = False
    started: float = 0.0
    crashes: int = 0
    restarts: int = 0
    start_at: float = 0.0
    ticks: int = -1
    ticked: float = 0.0
    killed: bool = False
    done_at: float = 0.0
    last_words: str = ""


class AgentLogic:
    """Keeps one learner and one syncer going until the run is over."""

    def __init__(self) -> None:
        self._children: dict[Child, _State] = {"learner": _State(), "syncer": _State()}
        self._leaving = False
        self._verdict: tuple[Exit, str] | None = None
        self._looked: float | None = None

    @property
    def restarts(self) -> int:
        """Return how often the learner was started again."""
        return self._children["learner"].restarts

    @property
    def leaving(self) -> bool:
        """Tell whether the island has been told to leave."""
        return self._leaving

    def last_words(self, child: Child) -> str:
        """Return why a child failed that has not got going again since; empty when it did not say."""
        return self._children[child].last_words

    # ---- events -------------------------------------------------------------------------------------------------

    def on_started(self, child: Child, now: float) -> None:
        """The driver started a child."""
        state = self._children[child]
        state.running, state.started, state.ticks, state.ticked, state.killed = True, now, -1, now, False

    def on_exit(self, child: Child, code: int, now: float, last_words: str = "") -> None:
        """A child ended; `code` is negative for a signal, `last_words` what it gave for a reason."""
        state = self._children[child]
        state.running, state.last_words = False, last_words
        why = f": {last_words}" if last_words else "; see the island's log"
        # A child that was told to leave while it was still starting just ends by the signal.
        left = code in (Exit.LEFT, -signal.SIGTERM)
        if code == Exit.DONE or (left and (self._leaving or self._children["syncer"].done)):
            state.done, state.done_at = True, now
        elif code in (Exit.FENCED, Exit.RUN_GONE, Exit.CONFIG):
            self._verdict = self._verdict or (Exit(code), f"the {child} ended with exit code {code}{why}")
        else:
            state.crashes = 1 if now - state.started >= HEALTHY_AFTER else state.crashes + 1
            state.restarts += 1
            state.start_at = now + min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (state.crashes - 1))
            if state.crashes >= (MAX_CRASHES if code >= 0 else MAX_KILLS):
                how = f"exit code {code}" if code >= 0 else f"signal {-code}"
                self._verdict = self._verdict or (
                    Exit.GAVE_UP,
                    f"the {child} ended {state.crashes} times in a row, last with {how}{why}",
                )

    def on_reopened(self) -> None:
        """The syncer sees that the run goes on after its end: a learner that has left is wanted again."""
        self._children["learner"].done = False

    def on_terminate(self) -> None:
        """SIGTERM: the machine is about to be taken away, or somebody wants the island gone."""
        self._leaving = True

    def on_verdict(self, code: Exit, reason: str) -> None:
        """The driver found out that this island is over (fenced, run gone)."""
        self._verdict = self._verdict or (code, reason)

    def on_ticks(self, child: Child, ticks: int, now: float) -> None:
        """A child reported the counter of its main loop."""
        state = self._children[child]
        if ticks != state.ticks:
            state.ticks, state.ticked = ticks, now
        if ticks > 0 and state.running:
            state.last_words = ""

    def still(self, now: float) -> dict[str, float]:
        """Return for how many seconds the main loop of each child that is there has not turned."""
        return {child: now - state.ticked for child, state in self._children.items() if state.running}

    # ---- decisions ----------------------------------------------------------------------------------------------

    def decide(self, now: float, step_seconds: float | None) -> list[Act]:
        """Return what to do now."""
        if self._looked is not None and now - self._looked > LOOK_GAP:
            for state in self._children.values():
                state.ticked = now
        self._looked = now
        if self._verdict is not None:
            return self._end(*self._verdict)
        if self._leaving:
            return self._leave()
        if all(state.done for state in self._children.values()):
            return [Act("exit", code=Exit.DONE, reason="the run is over")]
        acts: list[Act] = []
        for child, state in self._children.items():
            if not state.running and not state.done and now >= state.start_at:
                acts.append(Act("start", child))
            elif child == "learner" and state.running and self._overdue(now):
                acts.append(Act("terminate", child))
            elif state.running and not state.killed and self._hung(child, state, now, step_seconds):
                state.killed = True
                acts.append(Act("kill", child, reason=f"no turn of its main loop for {now - state.ticked:.0f} s"))
        return acts

    def _overdue(self, now: float) -> bool:
        """Tell whether the learner goes on although the run is over (it was reopened and stopped again in between)."""
        syncer = self._children["syncer"]
        return syncer.done and now - syncer.done_at > END_PATIENCE

    def _hung(self, child: Child, state: _State, now: float, step_seconds: float | None) -> bool:
        limit = HUNG_AFTER
        if child == "learner":
            limit = max(limit, HUNG_STEPS * (step_seconds or 0.0))
        return now - state.ticked > (START_LIMIT if state.ticks <= 0 else limit)

    def _end(self, code: Exit, reason: str) -> list[Act]:
        running: list[Child] = [child for child, state in self._children.items() if state.running]
        if running:
            return [Act("kill", child) for child in running]
        return [Act("exit", code=code, reason=reason)]

    def _leave(self) -> list[Act]:
        """Learner first, then the syncer: the last offers may still be merged here."""
        if self._children["learner"].running:
            return [Act("terminate", "learner")]
        if self._children["syncer"].running:
            return [Act("terminate", "syncer")]
        return [Act("exit", code=Exit.LEFT, reason="told to leave")]
