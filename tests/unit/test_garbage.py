"""What is collected after a commit: everything that nobody can ask for any more, and nothing else."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.simulation.clocks import WorldClock, WorldNonces
from diloco_cli.simulation.world import World
from diloco_runtime.blackboard import Blackboard
from diloco_runtime.garbage import collect, collectable, is_pinned
from diloco_runtime.keys import version_at
from diloco_runtime.records import CallRecord, CommitRecord, encode
from diloco_runtime.store_memory import MemoryStore
from tests.behaviours.samples import run_record
from tests.support.run_records import RUN_ID, commit, entry

_numbers = itertools.count()
usual = settings(max_examples=30, deadline=None, derandomize=True, database=None)


class History:
    """A run's log and payloads, growing commit by commit; every seq has payloads of all kinds, also unreferenced."""

    def __init__(self, fragments: int, keep: int, snapshot_every: int) -> None:
        self.fragments, self.keep, self.snapshot_every = fragments, keep, snapshot_every
        self.store = MemoryStore(f"unit/garbage-{next(_numbers)}")
        world = World()
        self.board = Blackboard(self.store, RUN_ID, WorldClock(world), WorldNonces(world))
        self.board.create_run(run_record(RUN_ID))
        self.head = self._commit(0)
        for seq in range(1, fragments + 1):
            self._open(seq)

    def _put(self, seq: int, kind: str, nonce: str) -> str:
        key = self.board.keys.blob(seq, kind, 0, nonce)
        self.store.put(key, b"payload")
        return key

    def _open(self, seq: int) -> None:
        """Merge `seq` is called and has offers."""
        call = CallRecord(run_id=RUN_ID, nonce="n", seq=seq, island="iowa", incarnation=1)
        self.store.create(self.board.keys.call(seq), encode(call))
        for nonce in ("merged", "refused", "never-recorded"):
            self._put(seq, "delta", nonce)

    def _commit(self, seq: int) -> CommitRecord:
        def ref(kind: str, nonce: str) -> dict[str, object]:
            return {"key": self._put(seq, kind, nonce), "size": 1, "sha256": "0"}

        pieces = tuple(ref("params", f"won{i}") for i in range(1 if seq else self.fragments))
        self._put(seq, "params", "lost-the-race")
        record = commit(
            seq, self.fragments, params=pieces, momentum=ref("momentum", "won") if seq else None,
            merged=(entry("merged", payload=ref("delta", "merged")),) if seq else (),
        )  # fmt: skip
        self.store.create(self.board.keys.log(seq), encode(record))
        return record

    def grow(self) -> None:
        self.head = self._commit(self.head.seq + 1)
        self._open(self.head.seq + self.fragments)

    def collect(self) -> int:
        return collect(self.board, self.head, self.fragments, self.keep, self.snapshot_every)

    def pinned(self, version: int) -> bool:
        """Tell by looking at every position at which a version is the newest of its fragment."""
        return any(position % self.snapshot_every == 0 for position in range(version, version + self.fragments))

    def expected(self, seq: int) -> set[str]:
        """Return the names below `blobs/<seq>/` that have to be there at this head."""
        if seq == 0:
            return {f"params-0000-won{i}" for i in range(self.fragments)} | {"params-0000-lost-the-race"}
        if seq <= self.head.seq - self.keep * self.fragments:
            return {"params-0000-won0"} if self.pinned(seq) else set()
        names = {f"delta-0000-{nonce}" for nonce in ("merged", "refused", "never-recorded")}
        if seq <= self.head.seq:
            names |= {"params-0000-won0", "params-0000-lost-the-race", "momentum-0000-won"}
        return names

    def found(self, seq: int) -> set[str]:
        keys = self.store.list(self.board.keys.blobs(seq))
        return {key.rpartition("/")[2].removesuffix(".safetensors") for key in keys}

    def called(self) -> list[int]:
        return [seq for seq in range(1, self.head.seq + self.fragments + 1) if self.board.read_call(seq) is not None]

    def readable(self, position: int) -> bool:
        """Tell whether the parameters of every fragment at a log position are there."""
        commits = [self.board.read_commit(version_at(f, position, self.fragments)) for f in range(self.fragments)]
        return all(c is not None and self.store.get(ref.key) for c in commits for ref in c.params)


RUNS = {
    "fragments": st.integers(1, 4),
    "keep": st.integers(2, 3),
    "snapshot_every": st.integers(1, 11),
    "commits": st.integers(0, 24),
}


@usual
@given(**RUNS)
def test_exactly_what_nobody_can_ask_for_is_gone(fragments: int, keep: int, snapshot_every: int, commits: int) -> None:
    history = History(fragments, keep, snapshot_every)
    for _ in range(commits):
        history.grow()
        history.collect()
    head, window = history.head.seq, keep * fragments
    for seq in range(head + fragments + 1):
        assert history.found(seq) == history.expected(seq), seq
    assert history.called() == list(range(max(1, head - window + 1), head + fragments + 1))
    for position in range(head + 1):
        pinned = position % snapshot_every == 0
        retained = position > head - window + fragments - 1
        assert history.readable(position) or not (pinned or retained), position
    assert all(history.board.read_commit(seq) is not None for seq in range(head + 1)), "the log is the audit"
    history.store.delete_tree("")


@usual
@given(**RUNS, seed=st.randoms(use_true_random=False))
def test_whatever_sweeps_are_left_out_nothing_that_is_needed_goes(
    fragments: int, keep: int, snapshot_every: int, commits: int, seed
) -> None:
    """A syncer that dies leaves its sweeps out; each seq is swept twice, so most of that goes a window later."""
    history = History(fragments, keep, snapshot_every)
    window, swept = keep * fragments, set[int]()
    for _ in range(commits):
        history.grow()
        if seed.random() < 0.5:
            history.collect()
            swept |= {history.head.seq - window, history.head.seq - 2 * window}
    for seq in range(history.head.seq + fragments + 1):
        assert history.expected(seq) <= history.found(seq), seq
        assert history.found(seq) == history.expected(seq) or seq not in swept, seq
    history.store.delete_tree("")


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(version=st.integers(0, 400), fragments=st.integers(1, 30), every=st.one_of(st.integers(1, 40), st.just(120)))
def test_a_version_is_pinned_when_it_is_current_at_a_snapshot(version: int, fragments: int, every: int) -> None:
    current = range(version, version + fragments)
    assert is_pinned(version, fragments, every) == any(position % every == 0 for position in current)


def test_every_seq_is_swept_twice_and_in_between_left_alone() -> None:
    swept = [seq for head in range(200) for seq in collectable(head, fragments=4, keep_versions=3)]
    assert sorted(swept) == sorted([*range(1, 188), *range(1, 176)])
    assert collectable(12, 4, 3) == [] and collectable(13, 4, 3) == [1] and collectable(25, 4, 3) == [13, 1]


def test_what_a_frozen_process_writes_behind_the_sweep_goes_a_window_later() -> None:
    history = History(fragments=2, keep=2, snapshot_every=1000)
    for _ in range(5):
        history.grow()
        history.collect()
    assert history.found(1) == set()
    late = history._put(1, "delta", "thawed")
    for _ in range(4):
        assert history.store.get(late)
        history.grow()
        history.collect()
    assert history.store.get(late) is None
    history.store.delete_tree("")


def test_it_says_how_many_objects_went_and_is_done_after_once() -> None:
    history = History(fragments=1, keep=2, snapshot_every=1000)
    for _ in range(3):
        history.grow()
    assert [history.collect(), history.collect()] == [6, 0]
    history.store.delete_tree("")
