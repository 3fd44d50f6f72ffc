"""A purged run is gone, its successor of the same name is untouched."""

from __future__ import annotations

import pytest

from diloco_runtime.blackboard import Blackboard
from diloco_runtime.errors import StoreUnavailable
from diloco_runtime.keys import RUN, Keys
from diloco_runtime.purge import leftover_runs, purge_run
from diloco_runtime.records import encode
from diloco_runtime.store import ObjectStore
from tests.behaviours.faults import Wrapped
from tests.behaviours.samples import OTHER_RUN_ID, RUN_ID, call_record, run_record


class Journal(Wrapped):
    """Notes what is deleted, and may fail before the tree is."""

    def __init__(self, inner: ObjectStore, fails: bool = False) -> None:
        super().__init__(inner)
        self.fails = fails
        self.deleted: list[str] = []

    def delete(self, key: str) -> None:
        self.deleted.append(key)
        self.inner.delete(key)

    def delete_tree(self, prefix: str) -> int:
        self.deleted.append(prefix)
        if self.fails:
            raise StoreUnavailable(f"no answer for {prefix}")
        return self.inner.delete_tree(prefix)


@pytest.fixture
def filled(board: Blackboard, store: ObjectStore) -> ObjectStore:
    """Return the store of a run with a few objects."""
    for seq in range(1, 4):
        board.create(board.keys.call(seq), call_record(seq, "x"))
    board.put_payload(board.keys.blob(1, "delta", 0, "n"), b"x")
    return store


def test_purge_deletes_run_json_first_and_everything_else_after(filled: ObjectStore) -> None:
    journal = Journal(filled)
    assert purge_run(journal, RUN_ID) == 5
    assert journal.deleted == [RUN, f"{RUN_ID}/"]
    assert filled.list("") == []
    assert purge_run(filled, RUN_ID) == 0


def test_an_interrupted_purge_is_found_and_finished(filled: ObjectStore) -> None:
    with pytest.raises(StoreUnavailable):
        purge_run(Journal(filled, fails=True), RUN_ID)
    assert filled.get(RUN) is None
    assert leftover_runs(filled) == [RUN_ID]
    assert purge_run(filled, RUN_ID) == 4
    assert leftover_runs(filled) == []
    assert filled.list("") == []


def test_the_successor_of_the_same_name_is_untouched(filled: ObjectStore) -> None:
    with pytest.raises(StoreUnavailable):
        purge_run(Journal(filled, fails=True), RUN_ID)
    new_run, new_call = run_record(OTHER_RUN_ID, "new"), call_record(1, "new", OTHER_RUN_ID)
    filled.create(RUN, encode(new_run))
    filled.create(Keys(OTHER_RUN_ID).call(1), encode(new_call))
    assert leftover_runs(filled) == [RUN_ID]
    assert purge_run(filled, RUN_ID) == 4
    assert filled.get(RUN) == encode(new_run)
    assert filled.list("") == [Keys(OTHER_RUN_ID).call(1), RUN]


def test_a_live_run_and_foreign_folders_are_no_leftovers(filled: ObjectStore) -> None:
    filled.create("notes/readme", b"x")
    assert leftover_runs(filled) == []


def test_a_run_id_that_is_none_is_refused(filled: ObjectStore) -> None:
    for run_id in ("", "..", "run.json", "0123456789ABCDEF"):
        with pytest.raises(ValueError, match="run id"):
            purge_run(filled, run_id)
    assert len(filled.list("")) == 5
