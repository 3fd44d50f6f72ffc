"""One look at a run: what its blackboard says and what is seen where its islands run. Reads, judges nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from diloco_cli.accounting import tokens_credited
from diloco_cli.sights import Sight
from diloco_runtime.blackboard import Blackboard
from diloco_runtime.clock import Clock
from diloco_runtime.errors import CorruptObject
from diloco_runtime.records import (
    CommitRecord,
    ControlRecord,
    Fragment,
    HeartbeatRecord,
    SupervisorHeartbeat,
    SupervisorRecord,
)

RECENT_COMMITS = 20
"""Commits over which the offers per commit are averaged."""

PACE_SECONDS = 120.0
"""Length of the window of own looks from which the pace of the run is taken."""

LIST_EVERY = 20
"""Looks between two listings of the islands on the blackboard: only islands that left the spec become known by it."""


@dataclass(frozen=True)
class IslandLook:
    """One island at one look."""

    name: str
    lives: tuple[HeartbeatRecord, ...] = ()
    """The newest heartbeat of every life that has one, oldest life first."""
    incarnation: int = 0
    """Newest claimed life."""
    sight: Sight = Sight()
    moved: float | None = None
    """When its agent's counter was seen to move last; None: not yet, by this observer."""
    learner_moved: float | None = None

    @property
    def beat(self) -> HeartbeatRecord | None:
        """The newest heartbeat, of the newest life that wrote one."""
        return self.lives[-1] if self.lives else None


@dataclass(frozen=True)
class Look:
    """Everything seen at one moment of the observer's monotonic clock."""

    at: float
    first_at: float
    """When this observer looked for the first time."""
    head: CommitRecord | None
    news: tuple[CommitRecord, ...]
    """Commits since the look before, oldest first; the head alone at the first look."""
    recent: tuple[CommitRecord, ...]
    table: tuple[Fragment, ...]
    control: ControlRecord | None
    supervisor: SupervisorRecord | None
    supervisor_moved: float | None
    islands: Mapping[str, IslandLook]
    pace: float | None
    """Tokens credited per second within the window of looks; None until a commit came in it."""
    unreadable: tuple[str, ...] = ()

    @property
    def reopened(self) -> bool:
        """Tell whether a request that the log does not know yet lets the run go on."""
        head, control = self.head, self.control
        return control is not None and control.action == "run" and (head is None or control.number > head.control)

    @property
    def over(self) -> bool:
        """Tell whether the final commit stands and nobody has reopened the run."""
        return self.head is not None and self.head.phase == "final" and not self.reopened

    @property
    def stop_requested(self) -> bool:
        return self.control is not None and self.control.action == "stop"


@dataclass
class _Counter:
    """Remembers when a value changed under this observer's eyes."""

    value: object = None
    looked: bool = False
    moved: float | None = None

    def note(self, value: object, now: float) -> None:
        if self.looked and value != self.value:
            self.moved = now
        self.value, self.looked = value, True


@dataclass
class _IslandMemory:
    incarnation: int = 0
    old_lives: list[HeartbeatRecord] = field(default_factory=list)
    beat: HeartbeatRecord | None = None
    agent: _Counter = field(default_factory=_Counter)
    learner: _Counter = field(default_factory=_Counter)


class Observer:
    """Looks at one run again and again; remembers what cannot change (old commits, ended lives)."""

    def __init__(
        self,
        board: Blackboard,
        clock: Clock,
        islands: Sequence[str],
        sights: Callable[[], Mapping[str, Sight]],
    ) -> None:
        """`islands`: those of the spec, in its order; `sights`: looks at the places where they run."""
        self._board = board
        self._clock = clock
        self._sights = sights
        self._memory = {name: _IslandMemory() for name in islands}
        self._first_at: float | None = None
        self._looks = 0
        self._table: tuple[Fragment, ...] = ()
        self._recent: deque[CommitRecord] = deque(maxlen=RECENT_COMMITS)
        self._news: list[CommitRecord] = []
        self._pace: deque[tuple[float, float]] = deque()
        self._supervisor = _Counter()

    def look(self) -> Look:
        """Look once. Raises `StoreUnavailable` when a read failed; what was read before comes with the next look."""
        board = self._board
        unreadable: list[str] = []
        self._read_log()
        supervisor = board.newest_supervisor()
        self._note_islands(supervisor)
        for name, memory in self._memory.items():
            try:
                self._read_island(name, memory)
            except CorruptObject as error:
                unreadable.append(str(error))
        beat = board.read_supervisor_heartbeat(supervisor.number) if supervisor is not None else None
        control = board.newest_control()
        now = self._clock.monotonic()
        self._first_at = now if self._first_at is None else self._first_at
        self._note_supervisor(supervisor, beat, now)
        sights = self._sights()
        head = self._recent[-1] if self._recent else None
        self._note_pace(now, tokens_credited(head, self._table))
        self._looks += 1
        return Look(
            at=now,
            first_at=self._first_at,
            head=head,
            news=self._take_news(),
            recent=tuple(self._recent),
            table=self._table,
            control=control,
            supervisor=supervisor,
            supervisor_moved=self._supervisor.moved,
            islands={name: self._island(name, sights.get(name, Sight())) for name in self._memory},
            pace=self._pace_now(),
            unreadable=tuple(unreadable),
        )

    def _read_log(self) -> None:
        if self._recent:
            while (commit := self._board.read_commit(self._recent[-1].seq + 1)) is not None:
                self._recent.append(commit)
                self._news.append(commit)
            return
        head, first = self._board.head(), self._board.read_commit(0)
        if head is None or first is None:
            return
        before = range(max(0, head.seq - RECENT_COMMITS + 1), head.seq)
        found = [*(self._board.read_commit(seq) for seq in before), head]
        self._table = first.fragments
        self._recent.extend(commit for commit in found if commit is not None)
        self._news.append(head)

    def _take_news(self) -> tuple[CommitRecord, ...]:
        news, self._news = tuple(self._news), []
        return news

    def _note_islands(self, supervisor: SupervisorRecord | None) -> None:
        names = list(supervisor.islands) if supervisor is not None else []
        if self._looks % LIST_EVERY == 0:
            names += self._board.list_islands()
        for name in names:
            self._memory.setdefault(name, _IslandMemory())

    def _read_island(self, name: str, memory: _IslandMemory) -> None:
        claim = self._board.newest_claim(name)
        newest = claim.incarnation if claim is not None else 0
        while memory.incarnation < newest:  # lives that are over: their last heartbeat is read once
            ended = self._board.read_heartbeat(name, memory.incarnation) if memory.incarnation else None
            if ended is not None:
                memory.old_lives.append(ended)
            memory.incarnation += 1
            memory.beat = None
        beat = self._board.read_heartbeat(name, newest) if newest else None
        memory.beat = beat or memory.beat
        now = self._clock.monotonic()
        if beat is not None:
            memory.agent.note((beat.incarnation, beat.agent, beat.counter), now)
            memory.learner.note((beat.incarnation, beat.learner.ticks), now)

    def _note_supervisor(self, record: SupervisorRecord | None, beat: SupervisorHeartbeat | None, now: float) -> None:
        if record is not None:
            self._supervisor.note((record.number, beat.counter if beat is not None else 0), now)

    def _island(self, name: str, sight: Sight) -> IslandLook:
        memory = self._memory[name]
        lives = (*memory.old_lives, *((memory.beat,) if memory.beat is not None else ()))
        return IslandLook(name, lives, memory.incarnation, sight, memory.agent.moved, memory.learner.moved)

    def _note_pace(self, now: float, tokens: float) -> None:
        self._pace.append((now, tokens))
        while len(self._pace) > 2 and now - self._pace[0][0] > PACE_SECONDS:
            self._pace.popleft()

    def _pace_now(self) -> float | None:
        (begin, before), (end, after) = self._pace[0], self._pace[-1]
        return (after - before) / (end - begin) if after > before and end > begin else None
