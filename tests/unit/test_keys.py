"""Keys sort like numbers, cannot be confused, and stay where they belong."""

from __future__ import annotations

import pytest

from diloco_runtime.keys import Keys, fragment_of, is_island_name, is_run_name, version_at, version_before
from diloco_runtime.store import is_key

RUN_ID = "0123456789abcdef"


def every_key(keys: Keys, number: int) -> list[str]:
    return [
        keys.log(number),
        keys.call(number),
        keys.offer(number, "iowa", number),
        keys.blob(number, "delta", number, "00ff"),
        keys.claim("iowa", number),
        keys.heartbeat("iowa", number),
        keys.checkpoint("iowa", number, number, "checkpoint.json"),
        keys.unit(number, number),
        keys.supervisor(number),
        keys.supervisor_heartbeat(number),
        keys.control(number),
        keys.metrics("iowa", number, number),
    ]


def test_every_key_is_a_key_below_the_run_id() -> None:
    for number in (0, 1, 999):
        keys = every_key(Keys(RUN_ID), number)
        assert len(set(keys)) == len(keys)
        for key in keys:
            assert is_key(key)
            assert key.startswith(f"{RUN_ID}/")


def test_listing_order_is_number_order() -> None:
    numbers = [0, 1, 2, 9, 10, 11, 99, 100, 999]
    for series in zip(*(every_key(Keys(RUN_ID), number) for number in numbers), strict=True):
        assert sorted(series) == list(series)


def test_prefixes_end_in_a_slash_and_hold_their_keys() -> None:
    keys = Keys(RUN_ID)
    for prefix, key in (
        (keys.offers(7), keys.offer(7, "iowa", 1)),
        (keys.blobs(7), keys.blob(7, "params", 0, "ff")),
        (keys.islands(), keys.life("iowa", 1)),
        (keys.life("iowa", 1), keys.claim("iowa", 1)),
        (keys.life("iowa", 1), keys.checkpoints("iowa", 1)),
        (keys.checkpoints("iowa", 1), keys.checkpoint("iowa", 1, 2, "x")),
    ):
        assert prefix.endswith("/")
        assert key.startswith(prefix)
    assert not keys.offer(70, "iowa", 1).startswith(keys.offers(7))


@pytest.mark.parametrize(
    "run_id", ["", "abc", "0123456g", "0123ABCD", "../01234567", "01234567/", "0" * 33, "01234567\n"]
)
def test_a_run_id_is_hex(run_id: str) -> None:
    with pytest.raises(ValueError, match="run id"):
        Keys(run_id)


@pytest.mark.parametrize("name", ["a", "iowa", "us-central1", "a1", "a" * 40])
def test_names(name: str) -> None:
    assert is_run_name(name)
    assert is_island_name(name)


@pytest.mark.parametrize("name", ["", "A", "1a", "-a", "a-", "a_b", "a.b", "a/b", "..", "a b", "a" * 41, "a\n", "é"])
def test_impossible_names(name: str) -> None:
    assert not is_run_name(name)
    assert not is_island_name(name)


@pytest.mark.parametrize("fragments", [1, 2, 3, 6])
def test_fragments_take_turns_and_versions_are_their_last_commits(fragments: int) -> None:
    versions = dict.fromkeys(range(fragments), 0)
    for head in range(4 * fragments + 1):
        if head:
            fragment = fragment_of(head, fragments)
            assert fragment == (head - 1) % fragments
            # An offer to this merge is anchored at what the fragment's version was until now.
            assert version_before(head, fragments) == versions[fragment]
            versions[fragment] = head
        assert {f: version_at(f, head, fragments) for f in range(fragments)} == versions
