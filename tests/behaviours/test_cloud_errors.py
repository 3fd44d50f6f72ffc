"""What cannot be helped by trying again: one sentence, at once, with store, key and remedy, and no secret in it."""

from __future__ import annotations

import time

import pytest

from diloco_runtime.errors import StoreUnavailable
from diloco_runtime.store import ObjectStore
from diloco_runtime.store_cloud import CloudStore, Limits
from tests.behaviours.clouds import HASTY, Cloud, open_with
from tests.support import buckets, servers
from tests.support.proxy import Faults

AT_ONCE = 10.0
"""Seconds that "at once" may take here: the first request of a session reads a service's description."""


def every_verb(store: ObjectStore) -> dict[str, str]:
    """Try each verb; return what each one's refusal says."""
    said = {}
    for name, call in {
        "read": lambda: store.get("a/b"),
        "create": lambda: store.create("a/b", b"x"),
        "write": lambda: store.put("a/b", b"x"),
        "list": lambda: store.list("a/"),
        "delete": lambda: store.delete("a/b"),
    }.items():
        with pytest.raises(StoreUnavailable) as refusal:
            call()
        said[name] = str(refusal.value)
    return said


PERMANENT = {
    "s3": [
        (403, "AccessDenied", "access denied", "let these credentials read, write, list and delete"),
        (404, "NoSuchBucket", "there is no such bucket", "create it, or correct [run] store"),
        (403, "RequestTimeTooSkewed", "this machine's clock is wrong", "set it"),
        (400, "IllegalLocationConstraintException", "the bucket is in another region", "[store] region, endpoint"),
        (400, "AuthorizationHeaderMalformed", "the bucket is in another region", "[store] region, endpoint"),
        (507, "XMinioStorageFull", "no space or quota is left", "free or buy some space"),
        (501, "NotImplemented", "it does not know this request", "conditional writes"),
        (400, "SomethingNew", "SomethingNew: no", "check [run] store and [store]"),
        (403, "InvalidAccessKeyId", "it does not know these credentials", "correct the keys"),
        (403, "SignatureDoesNotMatch", "it does not know these credentials", "correct the keys"),
        (400, "ExpiredToken", "the credentials have expired", "renew them"),
    ],
    "gs": [
        (403, "forbidden", "access denied", "role Storage Object User"),
        (404, "The specified bucket does not exist.", "there is no such bucket", "create it, or correct [run] store"),
        (403, "quotaExceeded", "no space or quota is left", "free or buy some space"),
        (400, "invalid", "400 invalid", "check [run] store and [store]"),
        (401, "authError", "it does not accept these credentials", "[store] credentials"),
    ],
}


@pytest.mark.parametrize("number", range(max(map(len, PERMANENT.values()))))
def test_a_lasting_refusal_is_one_sentence_at_once(cloud: Cloud, number: int) -> None:
    if number >= len(PERMANENT[cloud.kind]):
        number %= len(PERMANENT[cloud.kind])
    status, code, words, remedy = PERMANENT[cloud.kind][number]
    cloud.proxy.answer_next(status, code, times=1000)
    began = time.monotonic()
    for verb, said in every_verb(cloud.store()).items():
        assert said.startswith(f"{cloud.kind}://{buckets.BUCKET}/{cloud.folder}/trial: cannot {verb} a/")
        assert words in said and remedy in said and "\n" not in said
        assert servers.SECRET not in said
    assert time.monotonic() - began < AT_ONCE
    assert cloud.proxy.seen["scripted"] <= 10, "at most twice each: once more with credentials read anew"


def test_expired_credentials_are_read_again_once_before_anything_is_refused(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = cloud.store()
    status, code = (400, "ExpiredToken") if cloud.kind == "s3" else (401, "authError")
    for call in (lambda: store.create("a/b", b"x"), lambda: store.get("a/b"), lambda: store.list("")):
        cloud.proxy.answer_next(status, code)
        call()
    assert cloud.proxy.seen["scripted"] == 3
    assert cloud.direct.get("a/b") == b"x"


def test_keys_that_were_replaced_where_they_come_from_are_found(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    if cloud.kind == "gs":
        return  # the server takes any; see the scripted answers above
    monkeypatch.setenv("ROTATED_ACCESS_KEY_ID", servers.KEY)
    monkeypatch.setenv("ROTATED_SECRET_ACCESS_KEY", "of-yesterday")
    store = cloud.store(url=cloud.url().replace(buckets.ENV, "ROTATED"))
    with pytest.raises(StoreUnavailable, match="does not know these credentials"):
        store.put("a/b", b"x")
    monkeypatch.setenv("ROTATED_SECRET_ACCESS_KEY", servers.SECRET)
    store.put("a/b", b"x")
    assert cloud.direct.get("a/b") == b"x"


def test_a_bucket_that_is_not_there(cloud: Cloud) -> None:
    store = cloud.store(url=cloud.url().replace(buckets.BUCKET, "no-such-bucket"))
    # SeaweedFS makes buckets as they are needed, for those who may, and tells the others so.
    says = "access denied|no such bucket" if cloud.kind == "s3" else "no such bucket.*: create it, or correct"
    for call in (lambda: store.put("a/b", b"x"), lambda: store.create("a/b", b"x"), lambda: store.list("")):
        with pytest.raises(StoreUnavailable, match=says):
            call()


@pytest.mark.parametrize("fault", [Faults(refuse=True), Faults(black_hole=True), Faults(statuses={503: 1.0})])
def test_a_store_that_does_not_answer_is_given_up_in_time(cloud: Cloud, fault: Faults) -> None:
    store = cloud.store(HASTY)
    assert store.get("warm/up") is None
    cloud.proxy.faults = fault
    for verb, call in {"read": lambda: store.get("a/b"), "write": lambda: store.put("a/b", bytes(100_000))}.items():
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match=f"cannot {verb} a/b .*tried for [0-9]+ s") as refusal:
            call()
        # The last try begins within the patience and takes as long as a try may take.
        assert time.monotonic() - began < HASTY.patience + 2 * HASTY.stall + 100_000 / HASTY.slowest + 3.0
        assert "\n" not in str(refusal.value)
    cloud.proxy.faults = Faults()
    store.put("a/b", b"x")
    assert store.get("a/b") == b"x", "the store answers again, and so does the adapter"


def test_a_transfer_that_trickles_is_given_up(cloud: Cloud) -> None:
    cloud.direct.put("a/b", bytes(1_000_000))
    store = cloud.store(Limits(stall=0.5, slowest=1e6, patience=1.0))
    assert store.get("warm/up") is None
    cloud.proxy.faults = Faults(download_rate=200e3, upload_rate=200e3)
    for call in (lambda: store.get("a/b"), lambda: store.put("a/c", bytes(1_000_000))):
        with pytest.raises(StoreUnavailable, match="no answer in time"):
            call()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3://bucket/x?endpoint=http://127.0.0.1:1&credentials=env:NOWHERE",
         "NOWHERE_ACCESS_KEY_ID and NOWHERE_SECRET_ACCESS_KEY are not set"),
        ("s3://bucket/x?endpoint=http://127.0.0.1:1&credentials=profile:nobody", "~/.aws has no such profile"),
        ("s3://bucket/x?endpoint=http://127.0.0.1:1&region=a&credentials=anonymous", "the connection failed"),
        ("s3://bucket/x?endpoint=http://no-such-host.invalid&region=a&credentials=anonymous", "check the endpoint"),
        ("gs://bucket/x?endpoint=http://127.0.0.1:1&credentials=file:/no/such.json", "there is no file /no/such.json"),
        ("gs://bucket/x?endpoint=http://127.0.0.1:1&credentials=env:NOWHERE", "NOWHERE is not set"),
        ("gs://bucket/x?endpoint=http://127.0.0.1:1&credentials=anonymous", "check the endpoint and the network"),
        ("gs://bucket/x?endpoint=http://no-such-host.invalid&credentials=anonymous", "check the endpoint"),
    ],
)  # fmt: skip
def test_credentials_and_endpoints_that_are_not_there(url: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/nonexistent")
    for said in every_verb(open_with(url, Limits(stall=1.0, patience=0.5))).values():
        assert says in said and "\n" not in said


@pytest.mark.parametrize("content", ["hunter2", '{"private_key": "hunter2"}', '["hunter2"]'])
def test_a_key_in_the_environment_that_cannot_be_used_is_not_repeated(
    content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_KEY", content)
    store: CloudStore = open_with("gs://bucket/x?endpoint=http://127.0.0.1:1&credentials=env:SOME_KEY", HASTY)
    for said in every_verb(store).values():
        assert "SOME_KEY does not hold a key file's JSON" in said or "SOME_KEY holds no key that can be used" in said
        assert "hunter2" not in said
