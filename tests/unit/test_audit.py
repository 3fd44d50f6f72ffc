"""The token audit: it agrees with a history made by the real logic, and finds each way in which one can be wrong."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import pytest

from diloco_runtime.audit import Audit, read_audit
from diloco_runtime.blackboard import Blackboard
from diloco_runtime.errors import CorruptObject
from diloco_runtime.records import Fates, OfferEntry
from diloco_runtime.store_memory import MemoryStore
from tests.behaviours.samples import run_record
from tests.support.histories import History, usual_history
from tests.support.run_records import RUN_ID, entry

_numbers = itertools.count()


# ---- a history that is as it should be ------------------------------------------------------------------------------


@pytest.mark.parametrize("carry", [True, False])
def test_a_sound_history_balances_at_every_position(carry: bool) -> None:
    audit = usual_history(carry).audit()
    assert audit.check() == []
    last = audit.ledgers(6)
    assert {life for life, _ in last} == {("iowa", 1), ("oregon", 1), ("oregon", 2)}
    assert all(sum(getattr(ledger.fates, fate) for ledger in last.values()) for fate in ("merged", "refused", "late"))


def test_an_empty_history_has_nothing_wrong() -> None:
    assert Audit([], []).check() == []
    assert History().audit().check() == [] and History().audit().ledgers(0) == {}


@pytest.mark.parametrize(
    ("life", "fragment", "position", "expected"),
    [
        # Two steps of 8 tokens before the offer to 1.
        (("iowa", 1), 0, 0, Fates(processed=16, offered=16)),
        # The offer to 3 is known as soon as its anchor, version 1, is there: one step carried, two more made.
        (("iowa", 1), 0, 1, Fates(processed=40, merged=16, offered=24)),
        (("iowa", 1), 0, 2, Fates(processed=40, merged=16, offered=24)),
        (("iowa", 1), 0, 3, Fates(processed=64, merged=40, offered=24)),
        (("iowa", 1), 0, 6, Fates(processed=80, merged=64, offered=16)),
        # Four steps in the offer to 2, which was refused; the step made while it travelled was overwritten.
        (("oregon", 1), 1, 1, Fates(processed=32, offered=32)),
        (("oregon", 1), 1, 2, Fates(processed=56, refused=32, overwritten=8, offered=16)),
        (("oregon", 1), 1, 4, Fates(processed=56, refused=32, overwritten=8, late=16)),
        # The offer to 3 has no record: the next one tells that its 32 tokens were late.
        (("oregon", 1), 0, 2, Fates(processed=8, merged=8)),
        (("oregon", 1), 0, 4, Fates(processed=72, merged=8, late=32, offered=32)),
        (("oregon", 1), 0, 6, Fates(processed=72, merged=40, late=32)),
        # A new life counts from its own start.
        (("oregon", 2), 1, 5, Fates(processed=32, offered=32)),
        (("oregon", 2), 1, 6, Fates(processed=32, merged=32)),
    ],
)
def test_where_the_tokens_went(life: tuple[str, int], fragment: int, position: int, expected: Fates) -> None:
    assert usual_history().audit().ledgers(position)[life, fragment].fates == expected


# ---- histories that are broken --------------------------------------------------------------------------------------


def merged_by(history: History, seq: int) -> tuple[OfferEntry, ...]:
    return history.commits[seq].merged


Break = Callable[[History], object]
BROKEN: dict[str, tuple[Break, str]] = {
    "a commit is missing": (lambda h: h.commits.pop(3), "commit 3 says it is 4, of fragment 1"),
    "another parent": (lambda h: h.change(3, parent="x"), "commit 3 does not name 2 as its parent"),
    "two commits have changed places": (
        lambda h: h.commits.insert(3, h.commits.pop(4)),
        "commit 3 says it is 4, of fragment 1",
    ),
    "another fragment": (lambda h: h.change(3, fragment=1), "commit 3 says it is 3, of fragment 1"),
    "tokens were credited before the first merge": (
        lambda h: h.change(0, credited_total=8),
        "commit 0 adds up its credited tokens wrongly",
    ),
    "credited is not what was merged, and the total says so too": (
        lambda h: (
            [h.change(5, credited=h.commits[5].credited + 8)]
            + [h.change(seq, credited_total=h.commits[seq].credited_total + 8) for seq in range(5, len(h.commits))]
        ),
        "commit 5 adds up its credited tokens wrongly",
    ),
    "shares are not 1 together": (
        lambda h: h.change(5, merged=tuple(e.model_copy(update={"weight": 0.4}) for e in merged_by(h, 5))),
        "commit 5 merges with weights that are not 1 together",
    ),
    "merged and refused in one commit": (
        lambda h: h.change(3, refused=tuple(e.model_copy(update={"reason": "bad"}) for e in merged_by(h, 3))),
        "commit 3 refuses offer iowa-1-3 again",
    ),
    "refused though nobody offered it": (
        lambda h: h.change(5, refused=(entry("nobody", reason="bad"),)),
        "commit 5 refuses an offer nobody that was not made to it",
    ),
    "merged as another island's": (
        lambda h: h.change(3, merged=tuple(e.model_copy(update={"island": "tokyo"}) for e in merged_by(h, 3))),
        "commit 3 merges an offer iowa-1-3 that was not made to it",
    ),
    "merged on another anchor": (
        lambda h: (
            [h.change_offer("iowa-1-3", anchor=0)]
            + [h.change(3, merged=tuple(e.model_copy(update={"anchor": 0}) for e in merged_by(h, 3)))]
        ),
        "commit 3 merges an offer with another anchor than 1",
    ),
    "the total is not the sum": (
        lambda h: h.change(5, credited_total=h.commits[5].credited_total + 1),
        "commit 5 adds up its credited tokens wrongly",
    ),
    "credited is not what was added": (
        lambda h: h.change(5, credited=h.commits[5].credited - 8),
        "commit 5 adds up its credited tokens wrongly",
    ),
    "merged again in another commit": (
        lambda h: h.change(5, merged=merged_by(h, 5) + merged_by(h, 1)[:1]),
        "commit 5 merges offer iowa-1-1 again",
    ),
    "merged twice in one commit": (
        lambda h: h.change(5, merged=merged_by(h, 5) + merged_by(h, 5)[:1]),
        "commit 5 merges offer iowa-1-5 again",
    ),
    "merged though nobody offered it": (
        lambda h: h.change(5, merged=(*merged_by(h, 5), entry("nobody"))),
        "commit 5 merges an offer nobody that was not made to it",
    ),
    "merged where it was not offered": (
        lambda h: h.change(4, merged=merged_by(h, 5)),
        "commit 4 merges an offer iowa-1-5 that was not made to it",
    ),
    "merged with other tokens": (
        lambda h: h.change(3, merged=(entry("iowa-1-3", tokens=25),)),
        "commit 3 merges an offer iowa-1-3 that was not made to it",
    ),
    "the record of a merged offer is lost": (
        lambda h: h.offers.remove(next(o for o in h.offers if o.nonce == "iowa-1-3")),
        "commit 3 merges an offer iowa-1-3 that was not made to it",
    ),
    "the log forgets a merge that the life knows of": (
        lambda h: h.change(3, merged=()),
        r"at 3: life \('iowa', 1\) fragment 0: the life says merged, refused, offered \(40, 0, 24\), the log \(16, 0",
    ),
    "the log merges what the life calls late": (
        lambda h: h.change(3, merged=(*merged_by(h, 3), entry("iowa-1-1", tokens=16))),
        "commit 3 merges offer iowa-1-1 again",
    ),
    "a refusal that the life knows of is not in the log": (
        lambda h: h.change(2, refused=()),
        r"life \('oregon', 1\) fragment 1: the life says merged, refused, offered \(0, 32, 16\), the log \(0, 0, 16\)",
    ),
    "the life calls its offer another size": (
        lambda h: h.change_offer("iowa-1-7", tokens=24),
        r"life \('iowa', 1\) fragment 0: the life says merged, refused, offered \(64, 0, 16\), the log \(64, 0, 24\)",
    ),
    "the life says that more was merged": (
        lambda h: h.change_fates("iowa-1-5", merged=48),
        r"at 3: life \('iowa', 1\) fragment 0: the life says merged, refused, offered \(48, 0, 24\)",
    ),
    "the life forgets that an offer was late": (
        lambda h: h.change_offer("oregon-1-5", fates=(Fates(processed=72, merged=8, offered=32),) * 2),
        r"at 4: life \('oregon', 1\) fragment 0 does not balance",
    ),
    "tokens were processed that went nowhere": (
        lambda h: h.change_fates("iowa-1-7", processed=81),
        r"at 5: life \('iowa', 1\) fragment 0 does not balance: processed=81",
    ),
    "tokens went that were never processed": (
        lambda h: h.change_fates("oregon-1-4", overwritten=9),
        r"at 2: life \('oregon', 1\) fragment 1 does not balance",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_history_is_found(what: str) -> None:
    history = usual_history()
    assert history.audit().check() == []
    break_it, says = BROKEN[what]
    break_it(history)
    problems = history.audit().check()
    assert any(re.search(says, problem) for problem in problems), problems


def test_a_late_offer_that_the_life_does_not_call_late_is_found() -> None:
    history = usual_history()
    history.lives[0].steps(1)
    history.commit()
    iowa = history.lives[0]
    iowa.steps(1)
    iowa.offer(9)
    assert history.audit().check() == []
    history.change_fates("iowa-1-9", late=0)
    problems = history.audit().check()
    assert any("('iowa', 1) fragment 0: the life says" in problem for problem in problems), problems


def test_checking_twice_says_the_same() -> None:
    history = usual_history()
    history.change(3, parent="x")
    audit = history.audit()
    assert audit.check() == audit.check() == ["commit 3 does not name 2 as its parent"] == audit.problems


# ---- from the blackboard --------------------------------------------------------------------------------------------


@pytest.fixture
def board(clock, nonces) -> Blackboard:
    board = Blackboard(MemoryStore(f"unit/audit-{next(_numbers)}"), RUN_ID, clock, nonces)
    board.create_run(run_record(RUN_ID))
    return board


def write(board: Blackboard, history: History) -> None:
    for record in history.commits:
        board.create(board.keys.log(record.seq), record)
    for offer in history.offers:
        board.create(board.keys.offer(offer.seq, offer.island, offer.incarnation), offer)


def test_the_whole_log_and_every_offer_are_read(board: Blackboard) -> None:
    history = usual_history()
    write(board, history)
    audit = read_audit(board)
    assert audit.commits == history.commits
    assert sorted(offer.nonce for offer in audit.offers) == sorted(offer.nonce for offer in history.offers)
    assert audit.check() == []
    for position in range(7):
        assert audit.ledgers(position) == history.audit().ledgers(position)


def test_what_is_broken_on_the_blackboard_is_found(board: Blackboard) -> None:
    history = usual_history()
    history.change(5, merged=merged_by(history, 5) + merged_by(history, 1))
    write(board, history)
    assert "commit 5 merges offer oregon-1-1 again" in read_audit(board).check()


def test_a_gap_in_the_log_is_found(board: Blackboard) -> None:
    history = usual_history()
    for record in history.commits:
        board.create(board.keys.log(record.seq), record)
    for offer in history.offers:
        board.create(board.keys.offer(offer.seq, offer.island, offer.incarnation), offer)
    assert read_audit(board).check() == []
    board.store.delete(board.keys.log(3))
    assert any("the log has a gap at 3" in problem for problem in read_audit(board).check())


def test_an_offer_under_the_key_of_another_is_not_read_as_one(board: Blackboard) -> None:
    history = usual_history()
    write(board, history)
    board.create(board.keys.offer(3, "tokyo", 1), history.offers[0])
    with pytest.raises(CorruptObject, match="holds the offer of iowa-1 to 1"):
        read_audit(board)


def test_a_run_that_nobody_has_initialised_is_read_as_empty(board: Blackboard) -> None:
    assert read_audit(board) == Audit([], [])
