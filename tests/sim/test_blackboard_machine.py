"""Whatever the store does to whomever, the log has one history, every name one owner, and everybody knows which.

Bugs put in on purpose show that the comparison with the picture can fail.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from diloco_runtime import garbage
from diloco_runtime.blackboard import Blackboard
from diloco_runtime.errors import StoreUnavailable
from diloco_runtime.keys import Keys
from diloco_runtime.merging import Draft, Merging, OfferBook, payloads_of
from diloco_runtime.publisher import Publisher
from diloco_runtime.records import CommitRecord, R, Record, decode
from diloco_runtime.store import AlreadyExists
from diloco_runtime.store_local import LocalStore
from tests.sim.blackboard_machine import BlackboardMachine
from tests.sim.blackboard_picture import P

RUNS = settings(
    max_examples=120,
    stateful_step_count=30,
    derandomize=True,
    deadline=None,
    database=None,
    report_multiple_bugs=False,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)
HUNT = settings(RUNS, max_examples=1000, phases=[Phase.generate])
"""The same runs and more, up to the first that fails, which is not made smaller."""


def test_every_name_has_one_owner_and_the_log_one_history() -> None:
    run_state_machine_as_test(BlackboardMachine, settings=RUNS)


def test_so_it_is_over_a_folder(tmp_path: Path) -> None:
    folders = itertools.count()

    class LocalMachine(BlackboardMachine):
        open_store = staticmethod(lambda: LocalStore(f"{tmp_path}/{next(folders)}"))

    run_state_machine_as_test(LocalMachine, settings=settings(RUNS, max_examples=12))


# ---- bugs put in ----------------------------------------------------------------------------------------------------

Patch = pytest.MonkeyPatch
Settle = Callable[[Blackboard, str, Record, bytes, type[R]], R]


def _settling(patch: Patch, on_error: Callable[[Blackboard, str, Record, bytes, Exception], Record | None]) -> None:
    """Replace what becomes of a create: one try, and what `on_error` makes of its failure."""
    original = Blackboard._settle

    def settle(board: Blackboard, key: str, record: Record, data: bytes, kind: Any) -> Any:
        try:
            board.store.create(key, data)
            return record
        except (AlreadyExists, StoreUnavailable) as error:
            found = on_error(board, key, record, data, error)
        return found if found is not None else original(board, key, record, data, kind)

    patch.setattr(Blackboard, "_settle", settle)


def take_exists_for_my_own_write(patch: Patch) -> None:
    _settling(patch, lambda _b, _k, record, _d, error: record if isinstance(error, AlreadyExists) else None)


def take_an_error_for_a_success(patch: Patch) -> None:
    _settling(patch, lambda _b, _k, record, _d, error: record if isinstance(error, StoreUnavailable) else None)


def take_exists_for_anothers_write(patch: Patch) -> None:
    """Nobody reads back: whoever finds the name taken has lost, even to its own first try."""

    def lose(board: Blackboard, key: str, record: Record, data: bytes, error: Exception) -> Record | None:
        if isinstance(error, AlreadyExists) and board.store.get(key) is not None:
            return record.model_copy(update={"nonce": "another"})
        return None

    _settling(patch, lose)


def build_anew_what_is_absent(patch: Patch) -> None:
    """Absent on reading back counts as lost: the next try is of another record."""

    def settle(board: Blackboard, key: str, record: Record, data: bytes, kind: Any) -> Any:
        for _ in range(4):
            try:
                board.store.create(key, data)
                return decode(kind, data, key)
            except (AlreadyExists, StoreUnavailable):
                found = board.store.get(key)
            if found is not None:
                return decode(kind, found, key)
            record = record.model_copy(update={"nonce": board.new_nonce()})
            data = record.model_dump_json().encode() + b"\n"
        raise StoreUnavailable("unknown")

    patch.setattr(Blackboard, "_settle", settle)


def take_the_payloads_back_after_an_error(patch: Patch) -> None:
    original = Merging.create

    def create(merging: Merging, draft: Draft) -> CommitRecord:
        try:
            return original(merging, draft)
        except StoreUnavailable:
            for ref in payloads_of(draft.record):
                merging._board.delete_payload(ref)
            raise

    patch.setattr(Merging, "create", create)


def go_on_from_a_lost_commit(patch: Patch) -> None:
    """The loser of a race keeps its own tensors as those of the version that another made."""
    original = Merging.create

    def create(merging: Merging, draft: Draft) -> CommitRecord:
        standing = original(merging, draft)
        merging._state[draft.record.fragment] = (draft.record.seq, draft.params, draft.momentum)
        return standing

    patch.setattr(Merging, "create", create)


def replace_instead_of_create(patch: Patch) -> None:
    def settle(board: Blackboard, key: str, record: Record, data: bytes, kind: Any) -> Any:
        if board.store.get(key) is None:
            board.store.put(key, data)
        found = board.store.get(key)
        assert found is not None
        return decode(kind, found, key)

    patch.setattr(Blackboard, "_settle", settle)


def cache_listings(patch: Patch) -> None:
    original = Blackboard.list_offers

    def list_offers(board: Blackboard, seq: int) -> list[str]:
        known: dict[int, list[str]] = board.__dict__.setdefault("known", {})
        return known.setdefault(seq, original(board, seq))

    patch.setattr(Blackboard, "list_offers", list_offers)


def merge_an_offer_again(patch: Patch) -> None:
    """The offers to the previous merge of a fragment stay in the book for the next one."""
    original = Merging.collect

    def collect(merging: Merging, book: OfferBook) -> bool:
        news = original(merging, book)
        kept: dict[int, dict[str, Any]] = merging.__dict__.setdefault("kept", {})
        kept[book.seq] = dict(book.valid)
        book.valid.update(kept.get(book.seq - P, {}))
        return news

    patch.setattr(Merging, "collect", collect)


def forget_to_look_at_run_json(patch: Patch) -> None:
    patch.setattr(Blackboard, "check_identity", lambda board, trusted_seconds=0.0: None)


def look_at_run_json_only_once(patch: Patch) -> None:
    original = Blackboard.check_identity
    patch.setattr(Blackboard, "check_identity", lambda board, trusted_seconds=0.0: original(board, 1e9))


def forget_the_fence(patch: Patch) -> None:
    patch.setattr(Publisher, "check_fence", lambda publisher: None)


def leave_the_run_id_out_of_keys(patch: Patch) -> None:
    patch.setattr(Keys, "__init__", lambda keys, run_id: setattr(keys, "root", "00000000"))


def collect_a_version_too_many(patch: Patch) -> None:
    original = garbage.collectable
    patch.setattr(garbage, "collectable", lambda head, fragments, keep: original(head, fragments, keep - 1))


CREATOR = "does not hold what its creator was told|is a loser's"
PAYLOAD = "which is still needed|was written before its payload|is a loser's"
BUGS: dict[Callable[[Patch], None], str] = {
    take_exists_for_my_own_write: CREATOR,
    take_an_error_for_a_success: CREATOR,
    take_exists_for_anothers_write: CREATOR,
    build_anew_what_is_absent: f"{CREATOR}|{PAYLOAD}|nobody made",
    take_the_payloads_back_after_an_error: PAYLOAD,
    go_on_from_a_lost_commit: "is not built on the log",
    replace_instead_of_create: "was put without a condition",
    cache_listings: "the listing is not what is there",
    merge_an_offer_again: "judges an offer that was not made to it",
    forget_to_look_at_run_json: "after run .* was purged",
    look_at_run_json_only_once: "after run .* was purged",
    leave_the_run_id_out_of_keys: "a writer of run .* wrote",
    forget_the_fence: "a life that was replaced has offered",
    collect_a_version_too_many: PAYLOAD,
}
"""With what the first failing run says."""


@pytest.mark.parametrize(("bug", "found"), BUGS.items(), ids=[bug.__name__ for bug in BUGS])
def test_a_bug_is_found(bug: Callable[[Patch], None], found: str, monkeypatch: Patch) -> None:
    bug(monkeypatch)
    with pytest.raises(AssertionError, match=found):
        run_state_machine_as_test(BlackboardMachine, settings=HUNT)
