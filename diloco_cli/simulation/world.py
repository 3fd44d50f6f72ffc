"""A virtual world: processes whose threads are greenlets, over one virtual clock. Repeatable from one seed.

Time moves only when every thread waits; every sleep is a point at which another thread may run, and at which a process
can be killed or frozen. Nothing of the program is replaced except clock, nonces, store and processes, so what holds
here is what the program does.
"""

from __future__ import annotations

import heapq
import itertools
import random  # noqa: TID251 - the world's own generator, seeded by its maker
from collections.abc import Callable

import greenlet

SIGKILL, SIGTERM = -9, -15
"""Exit codes of a process that a signal ended."""

Body = Callable[[], object]


class Killed(greenlet.GreenletExit):
    """Raised in the threads of a process that dies, at the point where they wait."""


class Thread(greenlet.greenlet):
    """A thread of a process, or of nobody."""

    process: Process | None = None


class Process:
    """A process of the world."""

    def __init__(self, world: World, name: str, pid: int, parent: Process | None) -> None:
        self.world = world
        self.name = name
        self.pid = pid
        self.started = world.now
        self.exit_code: int | None = None
        self.on_terminate: Body | None = None
        """Handler of SIGTERM; without one it ends the process."""
        self.on_end: Callable[[int], None] | None = None
        self.frozen = False
        self.frozen_since = 0.0
        """When it was frozen last."""
        self.running_since = world.now
        """When it was started, or thawed last."""
        self.children: list[Process] = []
        self.threads: list[Thread] = []
        self._held: list[Thread] = []
        """Threads whose time came while the process was frozen."""
        self._terminated = False
        if parent is not None:
            parent.children.append(self)

    @property
    def alive(self) -> bool:
        return self.exit_code is None

    def family(self) -> list[Process]:
        """Return this process and its living descendants."""
        found = [self]
        for child in self.children:
            if child.alive:
                found += child.family()
        return found

    def terminate(self) -> None:
        """SIGTERM; a frozen process gets it when it wakes up."""
        if not self.alive:
            return
        if self.frozen:
            self._terminated = True
        elif self.on_terminate is not None:
            self.on_terminate()
        else:
            self.kill(SIGTERM)

    def kill(self, code: int = SIGKILL) -> None:
        """End the process where it stands. Its children are told by SIGTERM, as on Linux (PDEATHSIG)."""
        if self.alive:
            self.end(code)

    def end(self, code: int) -> None:
        """Note the end and let the world unwind the threads."""
        self.exit_code, self.frozen = code, False
        self.world.bury(self)
        for child in self.children:
            child.terminate()
        if self.on_end is not None:
            self.on_end(code)

    def freeze(self) -> None:
        """SIGSTOP."""
        if not self.frozen:
            self.frozen, self.frozen_since = self.alive, self.world.now

    def thaw(self) -> None:
        """SIGCONT."""
        if not self.frozen:
            return
        self.frozen, self.running_since = False, self.world.now
        for thread in self._held:
            self.world.push(self.world.now, thread)
        self._held.clear()
        if self._terminated:
            self._terminated = False
            self.terminate()

    def hold(self, thread: Thread) -> None:
        """Keep a thread that should run now until the process is thawed."""
        self._held.append(thread)


class World:
    """The scheduler: runs threads in order of their wake-up times."""

    def __init__(self, seed: int = 0) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.events = 0
        """Switches to a thread so far."""
        self.failures: list[BaseException] = []
        """Errors that no process is meant to end with, newest last; the first one ends `run`."""
        self._queue: list[tuple[float, int, Thread]] = []
        self._due: dict[greenlet.greenlet, int] = {}
        """Per thread the number of its valid queue entry: an earlier wake-up makes the older entry stale."""
        self._order = itertools.count()
        self._pids = itertools.count(100)
        self._hub = greenlet.getcurrent()
        self._processes: list[Process] = []
        self._doomed: list[Thread] = []
        self._until = 0.0
        self._stopped = False

    # ---- processes and threads --------------------------------------------------------------------------------------

    def process(self, name: str, main: Callable[[], int], parent: Process | None = None) -> Process:
        """Start a process at the present time; `main` returns its exit code. An error it raises fails the world."""
        found = Process(self, name, next(self._pids), parent)
        self._processes.append(found)

        def body() -> None:
            code = main()
            if found.alive:
                found.end(code)

        self._spawn(body, found)
        return found

    def thread(self, body: Body) -> None:
        """Start a thread of the calling process."""
        self._spawn(body, self.current())

    def at(self, seconds: float, action: Body) -> None:
        """Do something at a time, outside every process; it must not wait."""
        self._spawn(action, None, max(seconds, self.now))

    def current(self) -> Process:
        """Return the process of the calling thread."""
        process = self.me().process
        assert process is not None, "only threads of processes ask"
        return process

    @staticmethod
    def me() -> Thread:
        """Return the calling thread."""
        me = greenlet.getcurrent()
        assert isinstance(me, Thread), "only threads of the world wait"
        return me

    def _spawn(self, body: Body, process: Process | None, at: float | None = None) -> None:
        def guard() -> None:
            try:
                body()
            except greenlet.GreenletExit:
                pass
            except BaseException as error:
                self.failures.append(error)

        thread = Thread(guard, self._hub)
        if process is not None:
            thread.process = process
            process.threads.append(thread)
        self.push(self.now if at is None else at, thread)

    # ---- time -------------------------------------------------------------------------------------------------------

    def push(self, at: float, thread: Thread) -> None:
        """Let a thread run at a time."""
        number = next(self._order)
        self._due[thread] = number
        heapq.heappush(self._queue, (at, number, thread))

    def wake(self, thread: Thread) -> None:
        """End the wait of a thread now."""
        if thread in self._due:
            self.push(self.now, thread)

    def sleep(self, seconds: float) -> None:
        """Let time pass for the calling thread."""
        thread: Thread = greenlet.getcurrent()  # type: ignore[assignment]
        process = thread.process
        if process is None or process.exit_code is not None:
            raise Killed  # a thread that is being unwound does nothing more
        at = self.now + seconds if seconds > 0.0 else self.now
        queue = self._queue
        if (not queue or queue[0][0] > at) and at <= self._until:
            if not (process.frozen or self._doomed or self._stopped):
                self.now = at  # nobody else would run before: the same as a switch to the hub and back
                return
        number = next(self._order)
        self._due[thread] = number
        heapq.heappush(queue, (at, number, thread))
        if process.frozen or self._doomed or self._stopped or self.failures:
            self._hub.switch()
        else:
            self._next(thread)

    def _next(self, me: Thread | None) -> bool:
        """Let the thread run that is due next, straight from the calling one; False when the hub has to look."""
        queue, due = self._queue, self._due
        while queue:
            at, number, thread = queue[0]
            if due.get(thread) != number:
                heapq.heappop(queue)
                continue
            if at > self._until:
                break
            heapq.heappop(queue)
            del due[thread]
            if at > self.now:
                self.now = at
            process = thread.process
            if process is not None and process.frozen:
                process.hold(thread)
                continue
            if thread is not me:
                self.events += 1
                thread.switch()
            return True
        if me is not None:
            self._hub.switch()
        return False

    def bury(self, process: Process) -> None:
        """Unwind the threads of a process that has ended, at once or when the calling thread gives way."""
        me = greenlet.getcurrent()
        for thread in process.threads:
            self._due.pop(thread, None)
            if thread is not me:
                self._doomed.append(thread)
        process.threads.clear()
        if me is self._hub:
            self._unwind()

    def _unwind(self) -> None:
        while self._doomed:
            thread = self._doomed.pop()
            if not thread.dead:
                thread.throw(Killed)

    def stop(self) -> None:
        """End `run` as soon as the calling thread gives way."""
        self._stopped = True

    def run(self, until: float) -> None:
        """Run until a time, until `stop`, or until nobody is left; raise the first failure of a thread."""
        self._until, self._stopped = until, False
        while not self._stopped and self._next(None):
            if self._doomed:
                self._unwind()
            if self.failures:
                raise self.failures[0]
        if not self._stopped:
            self.now = max(self.now, until)

    def close(self) -> None:
        """Unwind every thread of a process that is left."""
        self._stopped = True
        for process in self._processes:
            process.exit_code = SIGKILL if process.exit_code is None else process.exit_code
            self._doomed += process.threads
        self._queue.clear()
        self._due.clear()
        self._unwind()
