"""What a bucket behind a bad network looks like: nothing lost, nothing half there, nothing wrongly believed absent."""

from __future__ import annotations

import threading
import time

import pytest

from diloco_runtime.blackboard import Blackboard
from diloco_runtime.errors import StoreUnavailable
from diloco_runtime.store import AlreadyExists
from diloco_runtime.store_cloud import Limits
from tests.behaviours.clouds import HASTY, Cloud, open_with
from tests.behaviours.samples import RUN_ID, call_record, run_record
from tests.support import buckets
from tests.support.gcs_server import GcsServer
from tests.support.proxy import Faults, Head


def is_write(head: Head) -> bool:
    return head.method in ("PUT", "POST")


def is_listing(head: Head) -> bool:
    return head.method == "GET" and ("list-type=2" in head.target or head.target.split("?")[0].endswith("/o"))


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504])
def test_what_is_refused_for_the_moment_is_asked_again(cloud: Cloud, status: int) -> None:
    store = cloud.store()
    for call in (
        lambda: store.create("a/b", b"first"),
        lambda: store.put("a/c", b"second"),
        lambda: store.get("a/b"),
        lambda: store.list("a/"),
        lambda: store.list_folders(""),
        lambda: store.delete("a/c"),
    ):
        cloud.proxy.answer_next(status, "")
        call()
    assert cloud.proxy.seen["scripted"] == 6
    assert cloud.direct.list("") == ["a/b"] and cloud.direct.get("a/b") == b"first"


def test_a_lost_answer_to_a_create_is_no_defeat(cloud: Cloud, clock, nonces) -> None:
    board = Blackboard(cloud.store(HASTY), RUN_ID, clock, nonces)
    cloud.proxy.faults = Faults(lost_answers=1.0, only=is_write)
    # Not one answer ever comes: reading back shows what happened all the same.
    assert board.create_run(run_record()) == run_record()
    board = Blackboard(cloud.store(), RUN_ID, clock, nonces)
    cloud.proxy.faults = Faults(lost_answers=0.4, only=is_write)
    for seq in range(1, 21):
        mine = call_record(seq, f"mine-{seq}")
        assert board.create(board.keys.call(seq), mine) == mine
    assert cloud.proxy.seen["lost answer"] >= 4
    assert len(cloud.direct.list(f"{RUN_ID}/calls/")) == 20


def test_the_loser_of_a_create_learns_who_won_whatever_gets_lost(cloud: Cloud, clock, nonces) -> None:
    winner = Blackboard(cloud.direct, RUN_ID, clock, nonces)
    winner.create_run(run_record())
    loser = Blackboard(cloud.store(), RUN_ID, clock, nonces)
    cloud.proxy.faults = Faults(lost_answers=0.4, statuses={503: 0.1})
    for seq in range(1, 11):
        theirs = winner.create(winner.keys.call(seq), call_record(seq, f"theirs-{seq}"))
        assert loser.create(loser.keys.call(seq), call_record(seq, f"mine-{seq}")) == theirs


def test_an_upload_that_breaks_leaves_nothing_and_is_made_again(cloud: Cloud) -> None:
    store, body = cloud.store(HASTY), bytes(range(256)) * 8192
    cloud.proxy.faults = Faults(resets=1.0, only=is_write)
    with pytest.raises(StoreUnavailable, match="cannot write a/b"):
        store.put("a/b", body)
    assert cloud.proxy.seen["cut upload"] >= 2
    assert cloud.direct.list("") == [] and cloud.direct.get("a/b") is None
    cloud.proxy.faults = Faults(resets=0.5, only=is_write)
    for number in range(6):
        cloud.store().put(f"b/{number}", body)
    assert [cloud.direct.get(f"b/{number}") == body for number in range(6)] == [True] * 6


def test_a_replaced_object_stays_whole_while_its_upload_breaks(cloud: Cloud) -> None:
    cloud.direct.put("a/b", b"old")
    cloud.proxy.faults = Faults(resets=1.0, only=is_write)
    with pytest.raises(StoreUnavailable):
        cloud.store(HASTY).put("a/b", bytes(2_000_000))
    assert cloud.direct.get("a/b") == b"old"


def test_a_listing_that_fails_is_no_empty_one(cloud: Cloud) -> None:
    cloud.direct.put("a/b", b"x")
    store = cloud.store(HASTY)
    for status, code in ((503, "SlowDown"), (403, "AccessDenied"), (429, "")):
        cloud.proxy.answer_next(status, code, is_listing, times=1000)
        for call in (lambda: store.list("a/"), lambda: store.list_folders(""), lambda: store.delete_tree("a/")):
            with pytest.raises(StoreUnavailable, match="cannot list"):
                call()
        cloud.proxy.forget()
    assert store.list("") == ["a/b"]


def test_a_listing_whose_second_page_fails_is_no_short_one(cloud: Cloud) -> None:
    for number in range(5):
        cloud.direct.put(f"a/{number}", b"x")
    store = cloud.store(HASTY)
    store.page_size = 2
    assert store.list("a/") == [f"a/{number}" for number in range(5)]

    def is_later_page(head: Head) -> bool:
        return is_listing(head) and ("continuation-token=" in head.target or "pageToken=" in head.target)

    cloud.proxy.answer_next(503, "SlowDown", is_later_page, times=1000)
    with pytest.raises(StoreUnavailable, match="cannot list a/"):
        store.list("a/")
    assert cloud.proxy.seen["scripted"] >= 2


def test_what_another_process_writes_is_seen_by_the_next_look(cloud: Cloud) -> None:
    store = cloud.store()
    for number in range(10):
        assert store.get(f"a/{number}") is None and f"a/{number}" not in store.list("a/")
        cloud.direct.create(f"a/{number}", b"x")
        assert store.get(f"a/{number}") == b"x" and f"a/{number}" in store.list("a/")
        cloud.direct.put(f"a/{number}", b"y")
        assert store.get(f"a/{number}") == b"y"
        cloud.direct.delete(f"a/{number}")
        assert store.get(f"a/{number}") is None and store.list("a/") == []


def test_a_download_that_ends_early_is_noticed(cloud: Cloud) -> None:
    cloud.direct.put("a/b", bytes(3_000_000))
    cloud.proxy.faults = Faults(short_answers=1.0)
    with pytest.raises(StoreUnavailable, match="cannot read a/b"):
        cloud.store(HASTY).get("a/b")
    cloud.proxy.faults = Faults(short_answers=0.5)
    assert all(cloud.store().get("a/b") == bytes(3_000_000) for _ in range(4))


def test_small_requests_pass_a_large_upload(cloud: Cloud) -> None:
    """A heartbeat must not wait for a payload, though they share connections, thread and proxy."""
    store = cloud.store()
    store.get("warm/up")
    cloud.proxy.faults = Faults(upload_rate=2e6)
    upload = threading.Thread(target=store.put, args=("large", bytes(6_000_000)))
    upload.start()
    beats = 0
    while upload.is_alive():
        began = time.monotonic()
        assert store.get("heart/beat") is None
        beats += time.monotonic() - began < 1.0
    upload.join()
    assert beats > 20


def test_racers_in_threads_have_one_winner_each(cloud: Cloud) -> None:
    cloud.proxy.faults = Faults(lost_answers=0.1)
    store, start = cloud.store(), threading.Barrier(4)
    won: list[list[int]] = [[] for _ in range(4)]

    def race(racer: int) -> None:
        for number in range(5):
            start.wait()
            body = f"{racer} of {number}".encode()
            try:
                store.create(f"race/{number}", body)
            except AlreadyExists:
                if store.get(f"race/{number}") != body:
                    continue
            won[racer].append(number)

    threads = [threading.Thread(target=race, args=(racer,)) for racer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(number for numbers in won for number in numbers) == [0, 1, 2, 3, 4]


def test_a_name_that_may_change_once_a_second_is_written_all_the_same() -> None:
    """As on Google and R2: a second write within a second is refused, and made again after a pause."""
    with GcsServer([buckets.BUCKET], one_write_per_second=True) as server:
        store = open_with(buckets.gs_url(server.url, "limited"), Limits())
        for number in range(3):
            store.put("heart/beat", f"{number}".encode())
        assert store.get("heart/beat") == b"2"
        store.delete("heart/beat")
        store.create("heart/beat", b"first")
        with pytest.raises(AlreadyExists):
            store.create("heart/beat", b"second")
        assert store.get("heart/beat") == b"first"


def test_a_bearer_token_that_is_refused_is_told() -> None:
    with GcsServer([buckets.BUCKET], tokens=frozenset({"known"})) as server:
        store = open_with(buckets.gs_url(server.url, "guarded"), HASTY)
        with pytest.raises(StoreUnavailable, match="does not accept these credentials"):
            store.get("a/b")
