"""The island's agent: `python -m diloco_runtime.island`.

Starts the learner (every start claims an incarnation) and the standby syncer, restarts what dies, forwards SIGTERM, and
writes the heartbeat from a process that neither a busy learner nor a slow upload can starve. Decides nothing about
training and never overwrites anything of the run.
"""

from __future__ import annotations

import signal
import threading
from typing import TypeVar

from diloco_runtime.agent_logic import Act, AgentLogic, Child
from diloco_runtime.backoff import pause_after
from diloco_runtime.children import ChildProcesses, Children
from diloco_runtime.clock import Clock, Signal
from diloco_runtime.errors import DilocoError, Fenced, StoreUnavailable
from diloco_runtime.identity import Identity, own_identity
from diloco_runtime.launch import (
    Exit,
    Launch,
    Surroundings,
    exit_code,
    leaving_on_sigterm,
    log,
    open_surroundings,
    run_process,
)
from diloco_runtime.records import ClaimRecord, HeartbeatRecord, LearnerStatus, SyncerStatus

S = TypeVar("S", LearnerStatus, SyncerStatus)

TURN = 0.1
"""Seconds between two looks at the children."""

LEAVE_SECONDS = 28.0
"""After SIGTERM what is left is killed: clouds give 30 s."""

NEWS_PAUSE = 1.0
"""Least seconds between two heartbeats, however much there is to tell (GCS and R2 allow one write per second); a
shorter heartbeat period is so too."""


class Agent:
    """One life of an island's agent. `turn` looks after the children, `beat` tells the blackboard."""

    def __init__(self, around: Surroundings, children: Children, me: Identity) -> None:
        self._around = around
        self._children = children
        self._me = me
        self._board = around.board
        self._clock = around.clock
        self._logic = AgentLogic()
        self.nonce = around.board.new_nonce()
        self._born = self._clock.monotonic()
        self._claim: ClaimRecord | None = None
        self._pending: ClaimRecord | None = None
        self._retry_at, self._failures = 0.0, 0
        self._counter = 0
        self._beaten: float | None = None
        self._told = ""
        self._leave_by: float | None = None
        self.state, self.reason = "running", ""
        self.news = around.clock.signal()
        self._lock = threading.Lock()

    # ---- children (main thread) -----------------------------------------------------------------------------------

    def leave(self) -> None:
        """Told to leave (SIGTERM)."""
        self._logic.on_terminate()

    def over(self, code: Exit, reason: str) -> None:
        """The heartbeat found out that this island is over."""
        self._logic.on_verdict(code, reason)

    def turn(self) -> Exit | None:
        """Look after the children once; return the exit code when everything is over."""
        now = self._clock.monotonic()
        for child, status in self._children.ended():
            log.log(20 if status == 0 else 30, "%s ended with code %d", child, status)
            self._logic.on_exit(child, status, now, self._children.last_words(child))
        learner = self._children.learner()
        syncer = self._children.syncer()
        if learner is not None:
            self._logic.on_ticks("learner", learner.ticks, now)
            if learner.state != self._told:
                self._told = learner.state
                self.news.set()
        if syncer is not None:
            self._logic.on_ticks("syncer", syncer.progress, now)
            if syncer.reopened:
                self._logic.on_reopened()
        if self._logic.leaving and self._leave_by is None:
            self._leave_by, self.state = now + LEAVE_SECONDS, "leaving"
            self.news.set()
        for act in self._logic.decide(now, learner.step_seconds if learner is not None else None):
            code = self._do(act, now)
            if code is not None:
                return code
        return None

    def _do(self, act: Act, now: float) -> Exit | None:
        if act.kind == "exit":
            self.state = "stopped" if act.code in (Exit.DONE, Exit.LEFT) else "failed"
            self.reason = act.reason
            return act.code
        assert act.child is not None
        if act.kind == "start":
            self._start(act.child, now)
        elif act.kind == "kill" or (self._leave_by is not None and now > self._leave_by):
            log.warning("killing the %s: %s", act.child, act.reason or "the island ends")
            self._children.signal(act.child, signal.SIGKILL)
        else:
            self._children.signal(act.child, signal.SIGTERM)
        return None

    def _start(self, child: Child, now: float) -> None:
        """Start a child; a learner, and the first syncer, need the claim of a life. An outage only postpones it."""
        if now < self._retry_at:
            return
        try:
            if child == "learner" or self._claim is None:
                self.claim_life()
        except Fenced as error:
            self.over(Exit.FENCED, str(error))
            return
        except StoreUnavailable as error:
            self._failures += 1
            self._retry_at = now + pause_after(self._failures)
            log.warning("cannot claim a life yet: %s", error)
            return
        self._failures = 0
        assert self._claim is not None
        self._children.start(child, self._claim.incarnation)
        self._logic.on_started(child, now)

    def claim_life(self) -> None:
        """Claim the next incarnation of this island; the same record is tried until its outcome is known."""
        launch = self._around.launch
        while True:
            if self._pending is None:
                newest = self._board.newest_claim(launch.island)
                self._check_fence(newest)
                self._pending = ClaimRecord(
                    run_id=self._board.run_id,
                    nonce=self._board.new_nonce(),
                    island=launch.island,
                    incarnation=1 if newest is None else newest.incarnation + 1,
                    agent=self.nonce,
                    host=self._me.host,
                    pid=self._me.pid,
                    started=self._me.started,
                    claimed_wall=self._clock.wall(),
                )
            mine = self._pending
            standing = self._board.create(self._board.keys.claim(launch.island, mine.incarnation), mine)
            self._pending = None
            if standing.nonce == mine.nonce:
                with self._lock:
                    self._claim = mine
                log.info("island %s begins life %d", launch.island, mine.incarnation)
                return

    def _check_fence(self, newest: ClaimRecord | None) -> None:
        """Raise `Fenced` when another agent has claimed a later life than this agent's last: an agent that was frozen
        must not fence the one that replaced it. The first claim of an agent takes the island over."""
        mine = self._claim
        if mine is not None and newest is not None and newest.incarnation > mine.incarnation:
            if newest.agent != self.nonce:
                raise Fenced(f"life {mine.incarnation} has been replaced by life {newest.incarnation}")

    # ---- heartbeat (its own thread) -------------------------------------------------------------------------------

    def beat(self) -> None:
        """Write one heartbeat, and find out whether this island has been replaced.

        Raises `StoreUnavailable`, `RunMismatch`.
        """
        with self._lock:
            claim = self._claim
        if claim is None:
            return
        launch, self._beaten = self._around.launch, self._clock.monotonic()
        newer = self._board.read_claim(launch.island, claim.incarnation + 1)
        if newer is not None and newer.agent != self.nonce:
            self.over(Exit.FENCED, f"life {claim.incarnation} has been replaced by life {newer.incarnation}")
        self._counter += 1
        self._board.write_heartbeat(
            HeartbeatRecord(
                run_id=self._board.run_id,
                nonce=self._board.new_nonce(),
                island=launch.island,
                incarnation=claim.incarnation,
                agent=self.nonce,
                counter=self._counter,
                state=self.state,
                reason=self.reason,
                learner=self._with_last_words("learner", self._children.learner() or LearnerStatus()),
                syncer=self._with_last_words("syncer", self._children.syncer() or SyncerStatus()),
                restarts=self._logic.restarts,
                uptime=self._clock.monotonic() - self._born,
                cpu_seconds=self._children.cpu(),
                still=self._logic.still(self._clock.monotonic()),
                host=claim.host,
                pid=claim.pid,
                started=claim.started,
                launch=launch.launch,
            )
        )

    def _with_last_words(self, child: Child, status: S) -> S:
        """Let a child that has not got going again say why it ended."""
        words = self._logic.last_words(child)
        return status.model_copy(update={"problem": f"its {child} failed: {words}"}) if words else status

    def last_beat(self) -> None:
        """Write the heartbeat that tells how this agent ended, not too soon after the one before."""
        if self._beaten is not None:
            pause = min(self._around.config.sync.heartbeat_every, NEWS_PAUSE)
            self._clock.sleep(max(0.0, self._beaten + pause - self._clock.monotonic()))
        self.beat()


def keep_beating(agent: Agent, period: float, stopped: Signal) -> None:
    """Beat once per period, sooner when there is news; an outage is no reason to stop."""
    while not stopped.is_set():
        agent.news.clear()
        try:
            agent.beat()
        except StoreUnavailable as error:
            log.warning("heartbeat not written: %s", error)
        except DilocoError as error:
            agent.over(exit_code(error), str(error))
            return
        pause = min(period, NEWS_PAUSE)
        stopped.wait(pause)
        agent.news.wait(max(0.0, period - pause))


def look_after(agent: Agent, clock: Clock, leaving: Signal) -> Exit:
    """Let the agent turn until the run is over, it is told to leave, or it cannot go on."""
    while True:
        if leaving.is_set():
            agent.leave()
        code = agent.turn()
        if code is not None:
            return code
        clock.sleep(TURN)


def say_goodbye(agent: Agent) -> None:
    """Write the last heartbeat if the store takes it."""
    try:
        agent.last_beat()
    except DilocoError as error:
        log.warning("last heartbeat not written: %s", error)


def tend(launch: Launch) -> Exit:
    """Run one island."""
    launch.state_dir.mkdir(parents=True, exist_ok=True)
    around = open_surroundings(launch)
    leaving = leaving_on_sigterm(around.clock)
    agent = Agent(around, ChildProcesses(launch), own_identity())
    stopped, period = around.clock.signal(), around.config.sync.heartbeat_every
    heart = threading.Thread(target=keep_beating, args=(agent, period, stopped), daemon=True, name="heartbeat")
    heart.start()
    code = look_after(agent, around.clock, leaving)
    stopped.set()
    agent.news.set()
    heart.join(timeout=2 * NEWS_PAUSE)
    say_goodbye(agent)
    log.info("island %s ends: %s", launch.island, agent.reason)
    return code


if __name__ == "__main__":
    run_process("agent", "diloco_runtime.island", tend)
