"""What every store does with bytes and keys."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from diloco_runtime.errors import ConfigError
from diloco_runtime.store import AlreadyExists, ObjectStore, open_store
from diloco_runtime.store_counting import CountingStore


def test_an_absent_object_is_none_and_an_absent_folder_is_empty(store: ObjectStore) -> None:
    assert store.get("a/b.json") is None
    assert store.list("a/") == []
    assert store.list("") == []
    assert store.list_folders("a/") == []
    store.delete("a/b.json")
    assert store.delete_tree("a/") == 0


@pytest.mark.parametrize("size", [1, 300, 3_000_000])
def test_bytes_come_back_as_they_were(store: ObjectStore, size: int) -> None:
    data = (bytes(range(256)) * (size // 256 + 1))[:size]
    store.create("a/created", data)
    store.put("a/put", data)
    assert store.get("a/created") == data
    assert store.get("a/put") == data


def test_create_never_replaces(store: ObjectStore) -> None:
    store.create("a/b", b"first")
    with pytest.raises(AlreadyExists, match="a/b"):
        store.create("a/b", b"second")
    assert store.get("a/b") == b"first"


def test_create_also_loses_to_a_put(store: ObjectStore) -> None:
    store.put("a/b", b"first")
    with pytest.raises(AlreadyExists):
        store.create("a/b", b"second")
    assert store.get("a/b") == b"first"


def test_put_replaces(store: ObjectStore) -> None:
    store.put("a/b", b"a longer first body")
    store.put("a/b", b"short")
    assert store.get("a/b") == b"short"


def test_a_deleted_name_is_free_again(store: ObjectStore) -> None:
    store.create("a/b/c", b"first")
    store.delete("a/b/c")
    assert store.get("a/b/c") is None
    store.create("a/b/c", b"second")
    assert store.get("a/b/c") == b"second"


def test_listing_is_sorted_and_stops_at_the_slash(store: ObjectStore) -> None:
    for key in ("log/2", "log/10", "log/1", "log2/1", "log/deep/er/3", "run.json"):
        store.create(key, b"x")
    assert store.list("log/") == ["log/1", "log/10", "log/2", "log/deep/er/3"]
    assert store.list("log/deep/") == ["log/deep/er/3"]
    assert store.list("") == ["log/1", "log/10", "log/2", "log/deep/er/3", "log2/1", "run.json"]


def test_folders_are_names_with_keys_below(store: ObjectStore) -> None:
    for key in ("i/oslo/1/claim", "i/iowa/1/claim", "i/iowa/2/claim", "i/file", "gone/x/y"):
        store.create(key, b"x")
    store.delete("gone/x/y")
    assert store.list_folders("i/") == ["iowa", "oslo"]
    assert store.list_folders("i/iowa/") == ["1", "2"]
    assert store.list_folders("") == ["i"]


def test_delete_tree_counts_and_spares_its_neighbours(store: ObjectStore) -> None:
    for key in ("r/a/1", "r/a/2", "r/b", "r2/a", "run.json"):
        store.create(key, b"x")
    assert store.delete_tree("r/") == 3
    assert store.list("") == ["r2/a", "run.json"]
    assert store.delete_tree("r/") == 0
    assert store.delete_tree("") == 2
    assert store.list("") == []


def test_empty_bodies_are_refused(store: ObjectStore) -> None:
    store.put("a/b", b"here")
    for write in (store.create, store.put):
        with pytest.raises(ValueError, match="empty"):
            write("a/b", b"")
    assert store.get("a/b") == b"here"


BAD_KEYS = [
    *("", ".", "a//b", "a/", "a\\b", "a b", "a\0b", "a\n", "é", "a/" + "b" * 600),
    *("/etc/passwd", "../x", "a/../../x", "a/..", ".tmp/x", "a/.tmp/x"),
]


@pytest.mark.parametrize("key", BAD_KEYS)
def test_keys_cannot_leave_the_folder_or_hide(store: ObjectStore, key: str) -> None:
    for call in (store.get, store.delete, lambda k: store.create(k, b"x"), lambda k: store.put(k, b"x")):
        with pytest.raises(ValueError, match="key"):
            call(key)


@pytest.mark.parametrize("prefix", ["a", "../", "/", "/etc/", "a//", ".tmp/"])
def test_prefixes_end_in_a_slash_and_cannot_leave_the_folder(store: ObjectStore, prefix: str) -> None:
    for call in (store.list, store.list_folders, store.delete_tree):
        with pytest.raises(ValueError, match="prefix"):
            call(prefix)


def test_runs_of_one_store_do_not_meet(store_url: str) -> None:
    one, two = open_store(store_url, "one"), open_store(store_url, "two")
    one.create("run.json", b"1")
    two.create("run.json", b"2")
    assert one.delete_tree("") == 1
    assert two.get("run.json") == b"2"


def test_the_same_url_is_the_same_store(store_url: str) -> None:
    open_store(store_url, "trial").create("a/b", b"x")
    place, mark, options = store_url.partition("?")
    assert open_store(f"{place}/{mark}{options}", "trial").get("a/b") == b"x"


def test_readers_see_one_body_or_the_other_while_it_is_replaced(store: ObjectStore) -> None:
    bodies = [bytes([letter]) * 400_000 for letter in b"AB"]
    store.put("a/b", bodies[0])
    stop = threading.Event()
    seen: list[bytes | None] = []

    def read() -> None:
        while not stop.is_set():
            data = store.get("a/b")
            if data not in bodies:
                seen.append(data)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for turn in range(60):
        store.put("a/b", bodies[turn % 2])
    stop.set()
    for reader in readers:
        reader.join()
    assert seen == []


def test_the_counting_store_counts_requests_and_bytes(store: ObjectStore) -> None:
    counting = CountingStore(store)
    counting.create("a/b", b"12345")
    with pytest.raises(AlreadyExists):
        counting.create("a/b", b"123")
    counting.put("a/c", b"12")
    assert counting.get("a/b") == b"12345"
    assert counting.get("a/none") is None
    assert counting.list("a/") == ["a/b", "a/c"]
    assert counting.list_folders("") == ["a"]
    counting.delete("a/b")
    assert counting.delete_tree("a/") == 1
    assert counting.requests == {
        "create": 2, "put": 1, "get": 2, "list": 1, "list_folders": 1, "delete": 1, "delete_tree": 1,
    }  # fmt: skip
    assert counting.bytes_up == 10
    assert counting.bytes_down == 5
    assert counting.url == store.url


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("ftp://bucket/x", "s3://bucket/folder, gs://bucket/folder or file:///absolute/folder"),
        ("az://bucket", "memory://name"),
        ("s3://", "names no bucket"),
        ("gs:///folder", "names no bucket"),
        ("s3://Bucket/x", "names no bucket"),
        ("gs://bucket/a b", "the folder may have"),
        ("s3://bucket/../x", "the folder may have"),
        ("s3://bucket/x?endpont=https://host", "unknown option endpont"),
        ("s3://bucket/x?endpoint=host", "endpoint must be a URL"),
        ("s3://bucket/x?endpoint=https://name:password@host", "without a name or a password"),
        ("s3://bucket/x?addressing=both", "addressing must be"),
        ("gs://bucket/x?region=us-east-1", "for s3:// only"),
        ("s3://bucket/x?credentials=file:keys.json", "credentials names where they come from"),
        ("gs://bucket/x?credentials=profile:work", "credentials names where they come from"),
        ("/just/a/path", "not supported"),
        ("", "not supported"),
        ("file:relative", "not supported"),
        ("file://relative/folder", "must be absolute"),
        ("file://", "must be absolute"),
        ("memory://", "plain name"),
        ("memory://a b", "plain name"),
    ],
)
def test_unknown_urls_are_refused_with_a_remedy(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_store(url, "trial")


SECRETS_IN_URLS = [
    *(
        "s3://AKIA:hunter2@bucket/x",
        "s3://bucket/x?credentials=hunter2",
        "s3://bucket/x?endpoint=https://a:hunter2@host",
    ),
    *("gs://bucket/x?hunter2", "gs://bucket/x#hunter2"),
]


@pytest.mark.parametrize("url", SECRETS_IN_URLS)
def test_a_secret_in_a_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        open_store(url, "trial")
    assert "hunter2" not in str(refusal.value)


@pytest.mark.parametrize("run", ["", "..", "a/b", "Trial", "-x", "x-", "a" * 41])
def test_impossible_run_names_are_refused(tmp_path: Path, run: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a run"):
        open_store(f"file://{tmp_path}", run)
