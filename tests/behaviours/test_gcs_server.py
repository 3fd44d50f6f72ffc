"""The stand-in for Google Cloud Storage keeps the rules that adapters are tested against."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import pytest

from tests.support.gcs_server import QUANTUM, GcsServer

# Otherwise gcsfs asks each bucket through another protocol what kind it is. It is read when gcsfs is imported.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")

AWKWARD = bytes(range(256)) + b"--edge\r\n--ed\n\r\n\r\n --edge\r"
"""Looks like the marks of a multipart body, and is none; ends in half an end of a line."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def why(self) -> tuple[int, str]:
        """Return status and reason of a refusal, which says them twice."""
        error = self.json["error"]
        assert error["code"] == self.status and error["errors"][0]["message"] == error["message"]
        return self.status, error["errors"][0]["reason"]


class Client:
    """Makes requests for the objects of the bucket `b`."""

    def __init__(self, server: GcsServer) -> None:
        self.server = server

    def call(self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=10)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return Answer(answer.status, answer.headers, answer.read())
        finally:
            connection.close()

    def get(self, name: str, headers: dict[str, str] | None = None, **query: object) -> Answer:
        return self.call("GET", f"/storage/v1/b/b/o/{quote(name, safe='')}?{urlencode(query)}", headers=headers)

    def data(self, name: str) -> bytes | None:
        answer = self.get(name, alt="media")
        return answer.body if answer.status == 200 else None

    def delete(self, name: str, **query: object) -> Answer:
        return self.call("DELETE", f"/storage/v1/b/b/o/{quote(name, safe='')}?{urlencode(query)}")

    def list(self, **query: object) -> Any:
        return self.call("GET", f"/storage/v1/b/b/o?{urlencode(query)}").json

    def names(self, **query: object) -> list[str]:
        return [item["name"] for item in self.list(**query).get("items", [])]

    def upload(self, kind: str, body: bytes, headers: dict[str, str], **query: object) -> Answer:
        return self.call("POST", f"/upload/storage/v1/b/b/o?{urlencode({'uploadType': kind} | query)}", body, headers)

    def media(self, name: str, data: bytes, **query: object) -> Answer:
        return self.upload("media", data, {"Content-Type": "text/plain"}, name=name, **query)

    def multipart(self, name: str, data: bytes, line: bytes = b"\r\n", about: Any = None, **query: object) -> Answer:
        parts = [
            *(b"--edge", b"Content-Type: application/json", b"", json.dumps({"name": name} | (about or {})).encode()),
            *(b"--edge", b"Content-Type: text/plain", b"", data),
            b"--edge--",
        ]
        return self.upload(
            "multipart", line.join(parts), {"Content-Type": 'multipart/related; boundary="edge"'}, **query
        )

    def begin(self, name: str, about: Any = None, **query: object) -> Answer:
        body, headers = json.dumps(about or {}).encode(), {"X-Upload-Content-Type": "text/plain"}
        return self.upload("resumable", body, headers, name=name, **query)

    def piece(self, begun: Answer, of: str, data: bytes = b"", method: str = "PUT") -> Answer:
        place = urlsplit(begun.headers["Location"])
        return self.call(method, f"{place.path}?{place.query}", data, {"Content-Range": f"bytes {of}"} if of else {})

    def resumable(self, name: str, data: bytes, about: Any = None, **query: object) -> Answer:
        begun = self.begin(name, about, **query)
        return self.piece(begun, "", data) if begun.status == 200 else begun


Upload = Callable[..., Answer]
UPLOADS: dict[str, Upload] = {"media": Client.media, "multipart": Client.multipart, "resumable": Client.resumable}


@pytest.fixture
def client() -> Iterator[Client]:
    with GcsServer(["b"]) as server:
        yield Client(server)


@pytest.fixture(params=UPLOADS)
def upload(request: pytest.FixtureRequest, client: Client) -> Upload:
    return UPLOADS[request.param].__get__(client)


@pytest.mark.parametrize("name", ["plain", "a/b/c", "ü é/%2F#?&+=", "../x"])
def test_what_is_uploaded_can_be_read(client: Client, upload: Upload, name: str) -> None:
    stored = upload(name, AWKWARD).json
    assert stored == client.get(name).json
    assert stored["name"] == name and stored["size"] == str(len(AWKWARD)) and stored["contentType"] == "text/plain"
    assert client.data(name) == AWKWARD and client.names() == [name]
    path = f"/download/storage/v1/b/b/o/{quote(name, safe='')}?alt=media"
    assert client.call("GET", path).body == AWKWARD
    head = client.call("HEAD", path)
    assert head.body == b"" and head.headers["Content-Length"] == str(len(AWKWARD))
    assert upload(name, b"").status == 200 and client.data(name) == b""


def test_a_multipart_body_may_have_either_end_of_line(client: Client) -> None:
    assert client.multipart("a", AWKWARD, line=b"\n").status == 200
    assert client.data("a") == AWKWARD
    assert client.upload("multipart", b"--edge\r\n", {"Content-Type": "multipart/related; boundary=edge"}).status == 400


def test_conditions_of_uploads(client: Client, upload: Upload) -> None:
    assert upload("a", b"no", ifGenerationMatch=7).why == (412, "conditionNotMet")
    assert upload("a", b"no", ifGenerationNotMatch=7).why == (412, "conditionNotMet"), "needs an object"
    assert client.names() == []
    first = upload("a", b"1", ifGenerationMatch=0).json["generation"]
    assert upload("a", b"no", ifGenerationMatch=0).why == (412, "conditionNotMet")
    second = upload("a", b"2", ifGenerationMatch=first).json["generation"]
    assert upload("a", b"no", ifGenerationMatch=first).why == (412, "conditionNotMet")
    assert upload("a", b"no", ifGenerationNotMatch=second).why == (412, "conditionNotMet")
    assert client.data("a") == b"2"
    assert upload("a", b"3", ifGenerationNotMatch=first).status == 200 and client.data("a") == b"3"
    assert upload("a", b"no", ifGenerationMatch="x").status == 400
    assert upload("a", b"no", ifMetagenerationMatch=1).status == 501, "what is not known is not passed over"


def test_generations_grow_over_deletes(client: Client, upload: Upload) -> None:
    found = []
    for _ in range(5):
        found.append(int(upload("a", b"x").json["generation"]))
        client.delete("a")
    assert found == sorted(set(found))


def test_conditions_of_reads(client: Client) -> None:
    old = client.media("a", b"1").json["generation"]
    new = client.media("a", b"2").json["generation"]
    for alt in ("media", "json"):
        assert client.get("a", alt=alt, ifGenerationMatch=new).status == 200
        assert client.get("a", alt=alt, ifGenerationMatch=old).why == (412, "conditionNotMet")
        assert client.get("a", alt=alt, ifGenerationNotMatch=old).status == 200
        unchanged = client.get("a", alt=alt, ifGenerationNotMatch=new)
        assert (unchanged.status, unchanged.body) == (304, b"")
        assert client.get("a", alt=alt, generation=new).status == 200
        assert client.get("a", alt=alt, generation=old).why == (404, "notFound")


def test_conditions_of_deletes(client: Client) -> None:
    old = client.media("a", b"1").json["generation"]
    new = client.media("a", b"2").json["generation"]
    assert client.delete("a", ifGenerationMatch=old).why == (412, "conditionNotMet")
    assert client.delete("a", ifGenerationNotMatch=new).why == (412, "conditionNotMet")
    assert client.data("a") == b"2"
    assert client.delete("a", ifGenerationMatch=new).status == 204
    assert client.delete("a").why == (404, "notFound") and client.names() == []


@pytest.mark.parametrize("upload", ["multipart", "resumable"], indirect=True)
def test_hashes_are_checked_and_told(client: Client, upload: Upload) -> None:
    right = {"md5Hash": "XUFAKrxLKna5cZ2REBfFkg==", "crc32c": "mnG7TA=="}
    for key, value in right.items():
        refusal = upload("a", b"hullo", about={key: value})
        assert refusal.why == (400, "invalid") and "doesn't match calculated" in refusal.json["error"]["message"]
    assert client.names() == []
    assert upload("a", b"hello", about=right).json.items() >= right.items()
    assert client.get("a", alt="media").headers["x-goog-hash"] == "crc32c=mnG7TA==,md5=XUFAKrxLKna5cZ2REBfFkg=="


def test_of_those_who_create_at_once_one_wins(client: Client, upload: Upload) -> None:
    racers, rounds = 8, 5
    start = threading.Barrier(racers)
    won: list[tuple[int, bytes]] = []

    def race(racer: int) -> None:
        for number in range(rounds):
            start.wait()
            body = f"{racer} of {number}".encode()
            answer = upload(f"race/{number}", body, ifGenerationMatch=0)
            if answer.status == 200:
                won.append((number, body))
            else:
                assert answer.status == 412

    threads = [threading.Thread(target=race, args=(racer,)) for racer in range(racers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == [(number, client.data(f"race/{number}")) for number in range(rounds)]


def test_a_name_changes_once_per_second(client: Client, upload: Upload) -> None:
    assert upload("a", b"1").status == upload("a", b"2").status == 200, "unless asked for, no limit"
    client.server.one_write_per_second = True
    began = time.monotonic()
    refusal = upload("a", b"3")
    assert refusal.why == (429, "rateLimitExceeded")
    assert "The object b/a exceeded the rate limit for object mutation" in refusal.json["error"]["message"]
    assert client.delete("a").status == 429
    assert client.data("a") == b"2" and upload("b", b"1").status == 200
    while upload("a", b"4").status == 429:
        assert time.monotonic() < began + 5
        time.sleep(0.02)
    assert time.monotonic() - began > 0.8 and client.data("a") == b"4"


def test_listings(client: Client) -> None:
    names = ["a", "a/1", "a/2", "a/b/1", "b/1", "c", "ü"]
    for name in reversed(names):
        client.media(name, b"x")
    assert client.names() == names
    assert client.names(prefix="a/") == ["a/1", "a/2", "a/b/1"]
    assert client.names(startOffset="a/2") == names[2:], "the offset itself is part of it"
    assert client.names(prefix="none") == [] and set(client.list(prefix="none")) == {"kind"}
    found = client.list(delimiter="/")
    assert [item["name"] for item in found["items"]] == ["a", "c", "ü"] and found["prefixes"] == ["a/", "b/"]
    found = client.list(delimiter="/", prefix="a/")
    assert [item["name"] for item in found["items"]] == ["a/1", "a/2"] and found["prefixes"] == ["a/b/"]


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("query", [{}, {"delimiter": "/"}, {"prefix": "a/", "delimiter": "/"}, {"startOffset": "a/2"}])
def test_pages_add_up(client: Client, size: int, query: dict[str, str]) -> None:
    for name in ("a/1", "a/2", "a/b/1", "a/b/2", "b/1", "c", "d/1"):
        client.media(name, b"x")
    whole, found, token = client.list(**query), [], ""
    while True:
        page = client.list(maxResults=size, **query, **({"pageToken": token} if token else {}))
        entries = [item["name"] for item in page.get("items", [])] + page.get("prefixes", [])
        assert 0 < len(entries) <= size
        found += entries
        if not (token := page.get("nextPageToken", "")):
            break
    assert sorted(found) == sorted([item["name"] for item in whole.get("items", [])] + whole.get("prefixes", []))


def test_listings_that_make_no_sense(client: Client) -> None:
    for query in ({"maxResults": 0}, {"maxResults": "x"}, {"pageToken": "?"}):
        assert client.call("GET", f"/storage/v1/b/b/o?{urlencode(query)}").why == (400, "invalid")


def test_what_is_not_there(client: Client, upload: Upload) -> None:
    for answer in (client.get("x/y"), client.get("x/y", alt="media"), client.delete("x/y")):
        assert answer.why == (404, "notFound") and answer.json["error"]["message"] == "No such object: b/x/y"
    for method, path in (
        ("GET", "/storage/v1/b/none"),
        ("GET", "/storage/v1/b/none/o"),
        ("GET", "/storage/v1/b/none/o/a"),
        ("DELETE", "/storage/v1/b/none/o/a"),
        ("POST", "/upload/storage/v1/b/none/o?uploadType=media&name=a"),
    ):
        answer = client.call(method, path)
        assert answer.why == (404, "notFound")
        assert answer.json["error"]["message"] == "The specified bucket does not exist."


def test_buckets(client: Client) -> None:
    made = client.call("POST", "/storage/v1/b?project=p", b'{"name": "new", "location": "US-EAST1"}')
    assert made.json["location"] == "US-EAST1" and made.json == client.call("GET", "/storage/v1/b/new").json
    assert client.call("POST", "/storage/v1/b?project=p", b'{"name": "new"}').status == 409
    client.server.create_bucket("kept", softDeletePolicy={"retentionDurationSeconds": "604800"})
    assert client.call("GET", "/storage/v1/b/kept").json["softDeletePolicy"]["retentionDurationSeconds"] == "604800"


def test_credentials(client: Client) -> None:
    def status(token: str) -> int:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return client.call("GET", "/storage/v1/b/b/o", headers=headers).status

    assert status("") == status("abc") == 200
    client.server.tokens = frozenset({"abc"})
    assert [status(token) for token in ("", "abc", "xyz")] == [401, 200, 401]
    assert client.get("a").why == (401, "authError")
    assert client.get("a").json["error"]["message"] == "Invalid Credentials"
    client.server.tokens = frozenset({"xyz"})
    assert [status(token) for token in ("abc", "xyz")] == [401, 200]
    client.server.forbidden = frozenset({"xyz"})
    refusal = client.get("a", headers={"Authorization": "Bearer xyz"})
    assert refusal.why == (403, "forbidden")
    assert (
        "Permission 'storage.objects.get' denied on resource (or it may not exist)" in refusal.json["error"]["message"]
    )
    client.server.tokens, client.server.forbidden = None, frozenset()
    assert status("xyz") == 200


@pytest.mark.parametrize("offset", [0.0, 3600.0, -86400.0])
def test_the_clock_may_be_wrong(client: Client, offset: float) -> None:
    client.server.clock_offset = offset
    for answer in (client.media("a", b"x"), client.get("none")):
        (date,) = answer.headers.get_all("Date", [])
        assert abs(parsedate_to_datetime(date).timestamp() - time.time() - offset) < 5


@pytest.mark.parametrize(
    ("asked", "status", "told", "body"),
    [
        ("bytes=2-4", 206, "bytes 2-4/10", b"234"),
        ("bytes=7-", 206, "bytes 7-9/10", b"789"),
        ("bytes=-2", 206, "bytes 8-9/10", b"89"),
        ("bytes=8-100", 206, "bytes 8-9/10", b"89"),
        ("lines=1", 200, None, b"0123456789"),
    ],
)
def test_ranges(client: Client, asked: str, status: int, told: str | None, body: bytes) -> None:
    client.media("a", b"0123456789")
    answer = client.get("a", {"Range": asked}, alt="media")
    assert (answer.status, answer.headers["Content-Range"], answer.body) == (status, told, body)
    assert client.get("a", {"Range": "bytes=10-"}, alt="media").status == 416


# ---- uploads in pieces ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["PUT", "POST"])
def test_an_upload_in_pieces_is_no_object_before_its_end(client: Client, method: str) -> None:
    data = os.urandom(2 * QUANTUM + 100)
    begun = client.begin("a")
    assert client.piece(begun, "*/*").headers["Range"] is None
    assert client.piece(begun, f"0-{QUANTUM - 1}/*", data[:QUANTUM], method).status == 308
    for of in ("*/*", f"*/{len(data)}"):
        asked = client.piece(begun, of)
        assert (asked.status, asked.headers["Range"]) == (308, f"bytes=0-{QUANTUM - 1}")
    assert client.names() == [] and client.data("a") is None
    last = client.piece(begun, f"{QUANTUM}-{len(data) - 1}/{len(data)}", data[QUANTUM:], method)
    assert last.status == 200 and client.data("a") == data
    assert client.piece(begun, f"*/{len(data)}").json == last.json, "who missed the answer can ask for it"


def test_a_piece_sent_again_adds_nothing_and_a_gap_is_refused(client: Client) -> None:
    data = os.urandom(3 * QUANTUM)
    begun = client.begin("a")
    for _ in range(2):
        answer = client.piece(begun, f"0-{QUANTUM - 1}/{len(data)}", data[:QUANTUM])
        assert (answer.status, answer.headers["Range"]) == (308, f"bytes=0-{QUANTUM - 1}")
    assert client.piece(begun, f"{2 * QUANTUM}-{3 * QUANTUM - 1}/{len(data)}", data[2 * QUANTUM :]).status == 400
    assert client.piece(begun, f"{QUANTUM}-{3 * QUANTUM - 1}/{len(data)}", data[:QUANTUM]).status == 400, "too little"
    assert client.piece(begun, f"0-{len(data) - 1}/{len(data)}", data).status == 200
    assert client.data("a") == data


def test_pieces_have_a_grain(client: Client) -> None:
    begun = client.begin("a")
    assert client.piece(begun, "0-99/*", bytes(100)).why == (400, "invalid")
    kept = client.piece(begun, f"0-{QUANTUM + 99}/*", bytes(QUANTUM + 100))
    assert (kept.status, kept.headers["Range"]) == (308, f"bytes=0-{QUANTUM - 1}")


def test_an_upload_in_pieces_can_lose_after_it_began(client: Client) -> None:
    begun = client.begin("a", ifGenerationMatch=0)
    client.media("a", b"theirs")
    assert client.piece(begun, "", b"mine").why == (412, "conditionNotMet")
    assert client.data("a") == b"theirs"


def test_an_upload_in_pieces_can_be_given_up(client: Client) -> None:
    begun = client.begin("a")
    assert client.piece(begun, "", method="DELETE").status == 499
    assert client.piece(begun, "", b"x").why == (404, "notFound") and client.names() == []


@pytest.mark.parametrize("kind", ["media", "multipart"])
def test_an_upload_that_breaks_off_is_no_object(client: Client, kind: str) -> None:
    client.media("a", b"old")
    head = f"POST /upload/storage/v1/b/b/o?uploadType={kind}&name=a HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    with socket.create_connection(("127.0.0.1", client.server.port), timeout=10) as raw:
        raw.sendall(head.encode() + bytes(500))
        raw.shutdown(socket.SHUT_WR)
        while raw.recv(1000):  # until the server has done with it
            pass
    assert client.data("a") == b"old" and client.names() == ["a"]


# ---- a real client --------------------------------------------------------------------------------------------------


def test_gcsfs_works_with_it(client: Client) -> None:
    import gcsfs

    files = gcsfs.GCSFileSystem(
        project="p", token="anon", endpoint_url=client.server.url, use_listings_cache=False, skip_instance_cache=True
    )
    large = os.urandom(4 * QUANTUM + 5)
    for name, data in (("a/small", AWKWARD), ("a/large", large)):
        for _ in range(2):
            files.pipe_file(f"b/{name}", data, chunksize=QUANTUM)
        assert files.cat_file(f"b/{name}") == data and files.info(f"b/{name}")["size"] == len(data)
        assert files.cat_file(f"b/{name}", start=3, end=9) == data[3:9]
        with pytest.raises(FileExistsError):
            files.pipe_file(f"b/{name}", b"mine", mode="create")
        with pytest.raises(FileExistsError):
            files.pipe_file(f"b/{name}", large, chunksize=QUANTUM, mode="create")
    assert files.find("b/a") == ["b/a/large", "b/a/small"]
    files.rm_file("b/a/small")
    assert client.names() == ["a/large"]
    with pytest.raises(FileNotFoundError):
        files.cat_file("b/a/small")
