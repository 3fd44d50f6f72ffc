"""The driver of supervision: looks at places and blackboard, lets `Supervision` decide, carries out.

Nothing depends on it but relaunches: it may die at any moment, the islands go on, and the next one adopts them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from diloco_cli.claim import Claim
from diloco_cli.island_report import Scene
from diloco_cli.island_watch import Limits
from diloco_cli.looking import Look, Observer
from diloco_cli.runs import Run, place, request_stop
from diloco_cli.sights import Ending, Sight
from diloco_cli.spec import Island, ProviderTable
from diloco_cli.status import StatusReport, build_report
from diloco_cli.supervision import LEAVE_WAIT, Action, End, Launch, Signal, StopRun, Supervision
from diloco_runtime.config import SyncConfig
from diloco_runtime.errors import StoreUnavailable
from diloco_runtime.identity import Identity
from diloco_runtime.records import LaunchIntent

TICK = 0.25
"""Seconds between two looks at the places: a dead island is noticed at once."""

LOOKS_PER_PERIOD = 2.0
"""Looks at the blackboard per heartbeat period; more show nothing new."""

SLOWEST_LOOK = 1.0
"""Seconds between looks at the blackboard at most: the display should not lag behind."""


def limits_of(provider: ProviderTable, sync: SyncConfig) -> Limits:
    """Return how patient to be, from the spec's provider table and the run's settings."""
    return Limits(
        heartbeat_every=sync.heartbeat_every,
        dead_after_reads=sync.dead_after_reads,
        max_restarts=provider.max_restarts,
        relaunch_after=provider.relaunch_after,
        replace_frozen_after=provider.replace_frozen_after,
        stalled_after=provider.stalled_after,
    )


class Provider(Protocol):
    """What a supervisor needs of the place where its islands run."""

    def sights(self) -> Mapping[str, Sight]:
        """Return what a look at the place shows, by island."""

    def ending(self, name: str, launch: str | None) -> Ending | None:
        """Return how a launch ended; None when nobody can know, or it lives."""

    def start(self, island: Island, launch: str) -> str:
        """Start an island's agent with this id of its launch; say where. Raises `OSError`."""

    def end(self, name: str, force: bool) -> None:
        """Ask an island to leave, or end all that is there of it."""


class Supervisor:
    """Supervises one run until it is over; `tick` is one turn."""

    def __init__(self, run: Run, provider: Provider, claim: Claim, me: Identity, say: Callable[[str], None]) -> None:
        """`claim`: not yet taken; `say`: receives one line per event, for people."""
        self._run = run
        self._config = run.config
        self._provider = provider
        self._claim = claim
        self._me = me
        self._say = say
        self._names = run.spec.island_names
        self._islands = {island.name: island for island in run.spec.islands}
        self._observer = Observer(run.board, run.clock, self._names, provider.sights)
        self._machine = Supervision(
            self._names, limits_of(run.spec.provider, run.config.sync), me.host, run.clock.monotonic()
        )
        self._launches: dict[str, int] = {}
        self._given_up: tuple[str, ...] = ()
        self._look: Look | None = None
        self._looked_at: float | None = None
        self._told: dict[str, tuple[str, str]] = {}
        self._trouble = ""
        self._strangers: dict[str, float] = {}
        self._merges = self._offers = 0

    def start(self) -> None:
        """Claim the run; raises `AnotherSupervisor` when somebody else has it."""
        self._launches = self._claim.take(self._names)

    def close(self) -> None:
        """Say on the blackboard that anyone may follow. Islands are left as they are."""
        self._claim.release(self._names, self._given_up)

    # ---- one turn ---------------------------------------------------------------------------------------------------

    def tick(self) -> End | None:
        """Look, decide, act once. Returns the end of supervision when it is reached.

        Raises `AnotherSupervisor` when replaced, `RunMismatch` when the run was purged.
        """
        now = self._run.clock.monotonic()
        self._look_at_places(now)
        if self._looked_at is None or now - self._looked_at >= self._look_every():
            self._looked_at = now
            self._look_at_blackboard()
        end = self._act(self._machine.decide(self._run.clock.monotonic()))
        self._tell_states()
        return end

    def _look_every(self) -> float:
        return min(SLOWEST_LOOK, self._config.sync.heartbeat_every / LOOKS_PER_PERIOD)

    def _look_at_places(self, now: float) -> None:
        found = self._provider.sights()
        for name in self._names:
            ending = self._provider.ending(name, self._machine.islands[name].launch)
            self._machine.saw_place(name, now, found.get(name, Sight()), ending)
        for name in found.keys() - set(self._names):
            self._retire(name, now)

    def _retire(self, name: str, now: float) -> None:
        """End an island that the spec does not have any more."""
        if name not in self._strangers:
            self._strangers[name] = now
            self._say(f"island {name} is not in the spec any more: asked to leave")
            self._provider.end(name, force=False)
        elif now - self._strangers[name] >= LEAVE_WAIT:
            self._provider.end(name, force=True)

    def _look_at_blackboard(self) -> None:
        try:
            self._claim.check()
            self._run.board.check_identity()
            look = self._observer.look()
        except StoreUnavailable as error:
            self._machine.read_failed()
            self._tell_trouble(str(error))
            return
        healthy = self._claim.healthy()
        self._tell_trouble("" if healthy else "the store takes no heartbeats; nobody is judged meanwhile")
        first, self._look = self._look is None, look
        for name in self._names:
            self._machine.saw_heartbeat(name, look.at, look.islands[name].beat, healthy)
        self._machine.saw_log(look.at, look.news, healthy)
        self._machine.saw_control(look.control)
        for commit in () if first else look.news:
            if commit.phase == "run":
                self._merges, self._offers = self._merges + 1, self._offers + len(commit.merged)

    # ---- acting -----------------------------------------------------------------------------------------------------

    def _act(self, actions: list[Action]) -> End | None:
        if self._look is None:
            return None  # nothing is decided blindly: neither launches nor the end
        try:
            for action in actions:
                if isinstance(action, End):
                    return action
                if isinstance(action, Signal):
                    what = "killed" if action.force else "asked to leave"
                    self._say(f"island {action.island}: {what}, {action.reason}")
                    self._provider.end(action.island, action.force)
                if isinstance(action, StopRun):
                    self._say(f"stopping the run: {action.reason}")
                    request_stop(self._run, action.reason)
                    self._machine.stop_sent()
            self._write_given_up()
            self._launch([action for action in actions if isinstance(action, Launch)])
        except StoreUnavailable as error:
            self._tell_trouble(str(error))  # what was not done is decided again at the next turn
        return None

    def _write_given_up(self) -> None:
        """Let the syncers know for whom not to wait."""
        given_up = self._machine.given_up()
        if given_up != self._given_up:
            self._claim.write(self._names, given_up=given_up)
            self._given_up = given_up

    def _launch(self, launches: list[Launch]) -> None:
        """Start islands: intents first, and none after a stop request, however late it came."""
        if not launches or self._stopped_meanwhile():
            return
        intents = tuple(
            LaunchIntent(
                island=launch.island,
                launches=self._launches[launch.island] + 1,
                reason=launch.reason,
                launch=self._run.board.new_nonce(),
            )
            for launch in launches
        )
        self._claim.write(self._names, launching=intents, given_up=self._given_up)
        for intent in intents:
            if self._stopped_meanwhile():
                return
            name, now = intent.island, self._run.clock.monotonic()
            self._launches[name] += 1
            try:
                where = self._provider.start(self._islands[name], intent.launch)
            except OSError as error:
                self._machine.launch_failed(name, now, f"could not be started ({error})")
                continue
            self._machine.launched(name, now, intent.launch)
            self._say(f"island {name}: launched as {where}, {intent.reason}")

    def _stopped_meanwhile(self) -> bool:
        control = self._run.board.newest_control()
        self._machine.saw_control(control)
        return self._machine.stop_requested

    def stop_requested(self) -> bool:
        """Tell whether somebody wants the run stopped, as far as the store tells."""
        try:
            return self._stopped_meanwhile()
        except StoreUnavailable:
            return self._machine.stop_requested

    # ---- telling ----------------------------------------------------------------------------------------------------

    def _tell_states(self) -> None:
        for name, island in self._machine.islands.items():
            verdict = (str(island.state), island.reason)
            if verdict[0] != self._told.get(name, ("PENDING", ""))[0] and verdict[0] != "STARTING":
                self._say(f"island {name}: {verdict[0]}{', ' + verdict[1] if verdict[1] else ''}")
            self._told[name] = verdict

    def _tell_trouble(self, trouble: str) -> None:
        if trouble and trouble != self._trouble:
            self._say(trouble)
        elif self._trouble and not trouble:
            self._say("the store answers again")
        self._trouble = trouble

    def report(self) -> StatusReport | None:
        """Return the run's state as this supervisor knows it, None before the first successful look."""
        if self._look is None:
            return None
        verdicts = {name: (str(island.state), island.reason) for name, island in self._machine.islands.items()}
        scene = Scene(self._look, self._config, self._me.host)
        return build_report(self._run.id, place(self._run.spec), scene, verdicts)

    def last_look(self) -> None:
        """Look once more, for the closing summary; an outage leaves the summary a little older."""
        self._looked_at = None
        self._look_at_blackboard()

    def offers_per_commit(self) -> float | None:
        """Return the mean over all commits that this supervisor saw, the final merges not counted."""
        return self._offers / self._merges if self._merges else None
