"""The proxy does to requests and answers what it says, and nothing else."""

from __future__ import annotations

import asyncio
import http.client
import json
import queue
import socket
import threading
import time
import xml.etree.ElementTree as xml
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import pytest

from tests.support.proxy import Faults, Head, Proxy

HELLO = b"hello"
LARGE = bytes(range(256)) * 2000


@dataclass
class Request:
    """What arrived of a request."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytearray = field(default_factory=bytearray)
    whole: bool = False


class Upstream:
    """A server that notes what it hears, and answers as the path asks. A context manager."""

    def __init__(self) -> None:
        self.requests: queue.Queue[Request] = queue.Queue()
        """Requests whose end has come, be it early."""
        self.begun: queue.Queue[int] = queue.Queue()
        """Sizes of pieces of bodies, as they come."""
        self.connections = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Upstream:
        self._thread.start()
        started = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(started, self._loop).result(10)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        self._server.close()
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        await asyncio.sleep(0)

    def heard(self) -> Request:
        """Return the next request."""
        return self.requests.get(timeout=10)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await self._exchange(reader, writer):
                await writer.drain()
        writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        method, target, _ = first.split(" ")
        request = Request(method, target, dict(line.lower().split(": ", 1) for line in lines))
        try:
            await self._read_body(request, reader)
            request.whole = True
        finally:
            self.requests.put(request)
        writer.write(answer_to(request))
        return not target.startswith("/until-closed")

    async def _read_body(self, request: Request, reader: asyncio.StreamReader) -> None:
        if request.headers.get("transfer-encoding") == "chunked":
            while size := int(await reader.readline(), 16):
                request.body += await reader.readexactly(size)
                await reader.readline()
            await reader.readline()
            return
        while left := int(request.headers.get("content-length", 0)) - len(request.body):
            if not (piece := await reader.read(left)):
                raise asyncio.IncompleteReadError(bytes(request.body), left)
            request.body += piece
            self.begun.put(len(piece))


def answer_to(request: Request) -> bytes:
    if request.target.startswith("/204"):
        return b"HTTP/1.1 204 No Content\r\n\r\n"
    if request.target.startswith("/304"):
        return b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n"  # the length that it would have
    if request.target.startswith("/chunked"):
        return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\n\r\n"
    if request.target.startswith("/until-closed"):
        return b"HTTP/1.1 200 OK\r\n\r\n" + HELLO
    body = LARGE if request.target.startswith("/large") else HELLO
    head = f"HTTP/1.1 200 Fine\r\nDate: then\r\nX-Kept: yes\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    return head if request.method == "HEAD" else head + body


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    with Upstream() as upstream:
        yield upstream


@pytest.fixture
def proxy(upstream: Upstream) -> Iterator[Proxy]:
    with Proxy(upstream.port, "s3") as proxy:
        yield proxy


class Client(http.client.HTTPConnection):
    """One connection, kept alive."""

    def __init__(self, proxy: Proxy) -> None:
        super().__init__("127.0.0.1", proxy.port, timeout=10)

    def call(self, method: str, target: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        self.request(method, target, body, headers)
        self.answer = self.getresponse()
        return self.answer.status, self.answer.read()


@contextmanager
def connected(proxy: Proxy) -> Iterator[Client]:
    client = Client(proxy)
    try:
        yield client
    finally:
        client.close()


@contextmanager
def raw(proxy: Proxy) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as connection:
        yield connection


def upload_head(size: int, *more: str) -> bytes:
    return "\r\n".join(["PUT /a HTTP/1.1", "Host: a:1", f"Content-Length: {size}", *more, "", ""]).encode()


def until_end(connection: socket.socket) -> bytes:
    """Read to the other side's farewell; a reset raises."""
    read = b""
    while piece := connection.recv(65536):
        read += piece
    return read


# ---- without faults -------------------------------------------------------------------------------------------------


def test_requests_and_answers_pass_unchanged_over_one_connection(upstream: Upstream, proxy: Proxy) -> None:
    with connected(proxy) as client:
        assert client.call("PUT", "/a%2Fb?c=%20d", LARGE, Host="signed.host:99", Authorization="x") == (200, HELLO)
        assert client.answer.reason == "Fine" and client.answer.headers["X-Kept"] == "yes"
        heard = upstream.heard()
        assert (heard.method, heard.target, heard.body) == ("PUT", "/a%2Fb?c=%20d", LARGE)
        assert heard.headers["host"] == "signed.host:99" and heard.headers["authorization"] == "x"
        assert client.call("GET", "/large") == (200, LARGE)
        assert client.call("HEAD", "/large") == (200, b"")
        assert client.call("DELETE", "/204") == (204, b"")
        assert client.call("GET", "/304") == (304, b"")
        assert client.call("GET", "/chunked") == (200, HELLO)
        assert client.call("GET", "/a") == (200, HELLO)
    assert upstream.connections == 1
    assert proxy.seen == {"PUT": 1, "GET": 4, "HEAD": 1, "DELETE": 1}


def test_chunked_uploads_pass(upstream: Upstream, proxy: Proxy) -> None:
    with connected(proxy) as client:
        for _ in range(2):
            client.request("PUT", "/a", iter([b"12", LARGE, b"3"]), encode_chunked=True)
            assert client.getresponse().read() == HELLO
            assert upstream.heard().body == b"12" + LARGE + b"3"


def test_an_answer_without_a_length_ends_with_its_connection(proxy: Proxy) -> None:
    with raw(proxy) as connection:
        connection.sendall(b"GET /until-closed HTTP/1.1\r\n\r\n")
        assert until_end(connection).endswith(b"\r\n\r\n" + HELLO)


def test_who_expects_a_word_before_sending_hears_it(upstream: Upstream, proxy: Proxy) -> None:
    with raw(proxy) as connection:
        connection.sendall(upload_head(5, "Expect: 100-continue"))
        assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(HELLO)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 Fine\r\n")
    heard = upstream.heard()
    assert heard.body == HELLO and "expect" not in heard.headers, "or the word would be said twice"


def test_bodies_are_passed_on_while_they_come(upstream: Upstream, proxy: Proxy) -> None:
    with raw(proxy) as connection:
        connection.sendall(upload_head(1000) + bytes(400))
        arrived = 0
        while arrived < 400:
            arrived += upstream.begun.get(timeout=10)
        assert upstream.requests.empty()
        connection.sendall(bytes(600))
        assert upstream.heard().body == bytes(1000)


def test_a_client_that_leaves_in_mid_upload_leaves_a_part(upstream: Upstream, proxy: Proxy) -> None:
    with raw(proxy) as connection:
        connection.sendall(upload_head(1000) + bytes(400))
        upstream.begun.get(timeout=10)
    assert not upstream.heard().whole


def test_without_a_server_connections_break(proxy: Proxy, upstream: Upstream) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        with Proxy(nobody.getsockname()[1], "s3") as proxy, raw(proxy) as connection:
            connection.sendall(upload_head(0))
            with pytest.raises(ConnectionResetError):
                connection.recv(1000)


# ---- slowness -------------------------------------------------------------------------------------------------------


def test_every_answer_is_late(proxy: Proxy) -> None:
    proxy.faults = Faults(latency=0.1)
    with connected(proxy) as client:
        for method, target in (("GET", "/a"), ("HEAD", "/a"), ("DELETE", "/204")):
            began = time.monotonic()
            client.call(method, target)
            assert time.monotonic() - began >= 0.1


@pytest.mark.parametrize("way", ["up", "down"])
def test_connections_share_a_rate(proxy: Proxy, way: str) -> None:
    rate = 2 * len(LARGE) / 0.4
    proxy.faults = Faults(upload_rate=rate) if way == "up" else Faults(download_rate=rate)
    answers = []

    def transfer() -> None:
        with connected(proxy) as client:
            answers.append(client.call("PUT", "/a", LARGE) if way == "up" else client.call("GET", "/large"))

    began = time.monotonic()
    threads = [threading.Thread(target=transfer) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began >= 0.36
    assert answers == [(200, HELLO if way == "up" else LARGE)] * 2
    with connected(proxy) as client:  # the other way is free
        began = time.monotonic()
        client.call("GET", "/large") if way == "up" else client.call("PUT", "/a", LARGE)
        assert time.monotonic() - began < 0.36


def test_a_black_hole_takes_and_never_answers(upstream: Upstream, proxy: Proxy) -> None:
    proxy.faults = Faults(black_hole=True)
    with raw(proxy) as connection:
        connection.sendall(upload_head(len(LARGE)) + LARGE)
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(1000)
    assert proxy.seen["black hole"] == 1 and upstream.requests.empty()
    proxy.faults = Faults()
    with connected(proxy) as client:
        assert client.call("GET", "/a") == (200, HELLO)


# ---- breaks ---------------------------------------------------------------------------------------------------------


def test_a_lost_answer_follows_a_whole_request(upstream: Upstream, proxy: Proxy) -> None:
    proxy.faults = Faults(lost_answers=1.0)
    with raw(proxy) as connection:
        connection.sendall(upload_head(len(LARGE)) + LARGE)
        with pytest.raises(ConnectionResetError):
            connection.recv(1000)
    heard = upstream.heard()
    assert heard.whole and heard.body == LARGE and proxy.seen["lost answer"] == 1


def test_uploads_break_at_any_point(upstream: Upstream, proxy: Proxy) -> None:
    proxy.faults = Faults(resets=1.0)
    arrived = set()
    for _ in range(8):
        with raw(proxy) as connection, pytest.raises((ConnectionResetError, BrokenPipeError)):
            connection.sendall(upload_head(len(LARGE)) + LARGE)
            connection.recv(1000)
        heard = upstream.heard()
        assert not heard.whole and LARGE.startswith(heard.body) and len(heard.body) < len(LARGE)
        arrived.add(len(heard.body))
    assert len(arrived) > 4 and proxy.seen["cut upload"] == 8
    with connected(proxy) as client:
        assert client.call("GET", "/large") == (200, LARGE), "no upload"


def test_downloads_break_in_their_middle(proxy: Proxy) -> None:
    proxy.faults = Faults(short_answers=1.0)
    with raw(proxy) as connection:
        connection.sendall(b"GET /large HTTP/1.1\r\n\r\n")
        read = b""
        with pytest.raises(ConnectionResetError):
            while True:
                piece = connection.recv(65536)
                assert piece, "a reset, no farewell"
                read += piece
    assert LARGE not in read and proxy.seen["short answer"] == 1


@pytest.mark.parametrize("alive", [True, False])
def test_a_refusing_proxy_breaks_connections_old_and_new(upstream: Upstream, proxy: Proxy, alive: bool) -> None:
    with raw(proxy) as connection:
        if alive:
            connection.sendall(upload_head(0))
            assert connection.recv(1000)
            upstream.heard()
            proxy.faults = Faults(refuse=True)
            connection.sendall(upload_head(0))
    proxy.faults = Faults(refuse=True)
    with pytest.raises((ConnectionResetError, BrokenPipeError)), raw(proxy) as connection:
        connection.sendall(upload_head(0))
        assert connection.recv(1000), "a reset, no farewell"
    assert upstream.requests.empty()


def test_faults_change_under_open_connections(proxy: Proxy) -> None:
    with connected(proxy) as client:
        assert client.call("GET", "/a")[0] == 200
        proxy.faults = Faults(statuses={503: 1.0})
        assert client.call("GET", "/a")[0] == 503
        proxy.faults = Faults()
        assert client.call("GET", "/a")[0] == 200


def test_faults_hit_only_what_they_are_for(upstream: Upstream, proxy: Proxy) -> None:
    proxy.faults = Faults(statuses={503: 1.0}, only=lambda head: head.method == "PUT" and "x=1" in head.target)
    with connected(proxy) as client:
        found = [client.call(method, target, HELLO)[0] for method in ("PUT", "POST") for target in ("/a", "/a?x=1")]
    assert found == [200, 503, 200, 200]


# ---- answers of its own ---------------------------------------------------------------------------------------------


def test_chance_follows_the_seed(upstream: Upstream) -> None:
    found = []
    for seed in (1, 1, 2):
        with Proxy(upstream.port, "s3", seed) as proxy, connected(proxy) as client:
            proxy.faults = Faults(statuses={503: 0.3, 429: 0.2})
            found.append([client.call("DELETE", "/204")[0] for _ in range(100)])
            counts = {status: found[-1].count(status) for status in (503, 429)}
            assert 15 <= counts[503] <= 45 and 8 <= counts[429] <= 35
            assert {int(kind): count for kind, count in proxy.seen.items() if kind.isdigit()} == counts
    assert found[0] == found[1] != found[2]
    assert upstream.requests.qsize() == sum(statuses.count(204) for statuses in found), "none of the others got there"


@pytest.mark.parametrize(("status", "code"), [(503, "SlowDown"), (409, "ConditionalRequestConflict")])
def test_drawn_refusals_as_s3_words_them(proxy: Proxy, status: int, code: str) -> None:
    proxy.faults = Faults(statuses={status: 1.0})
    with connected(proxy) as client:
        found, body = client.call("PUT", "/a", LARGE)
        error = xml.fromstring(body)
        assert found == status and error.tag == "Error" and error.findtext("Code") == code
        assert client.call("HEAD", "/a") == (status, b"")


@pytest.mark.parametrize(("status", "reason"), [(503, "backendError"), (429, "rateLimitExceeded")])
def test_drawn_refusals_as_google_words_them(upstream: Upstream, status: int, reason: str) -> None:
    with Proxy(upstream.port, "gcs") as proxy, connected(proxy) as client:
        proxy.faults = Faults(statuses={status: 1.0})
        found, body = client.call("POST", "/a", LARGE)
        error = json.loads(body)["error"]
        assert found == error["code"] == status and error["errors"][0]["reason"] == reason
        assert client.call("HEAD", "/a") == (status, b"")


def test_scripted_answers_are_given_once_to_those_they_are_for(upstream: Upstream, proxy: Proxy) -> None:
    proxy.answer_next(400, "ExpiredToken", lambda head: head.method == "PUT")
    proxy.answer_next(403, "RequestTimeTooSkewed", times=2, headers=(("Date", "long ago"),))
    with connected(proxy) as client:
        answers = []
        for method in ("GET", "PUT", "PUT", "PUT"):
            status, body = client.call(method, "/a", HELLO)
            answers.append((status, None if status == 200 else xml.fromstring(body).findtext("Code")))
        skewed = (403, "RequestTimeTooSkewed")
        assert answers == [skewed, (400, "ExpiredToken"), skewed, (200, None)]
        proxy.answer_next(404, "NoSuchBucket", headers=(("Date", "long ago"),))
        assert client.call("GET", "/a")[0] == 404 and client.answer.headers["Date"] == "long ago"
        proxy.answer_next(404, "NoSuchBucket")
        proxy.forget()
        assert client.call("GET", "/a")[0] == 200
    assert upstream.requests.qsize() == 2 and proxy.seen["scripted"] == 4


def test_the_time_and_the_target_can_be_changed_on_the_way(upstream: Upstream, proxy: Proxy) -> None:
    proxy.faults = Faults(date="Tue, 01 Jan 2030 00:00:00 GMT", rewrite=("asked=1", "asked=2"))
    with connected(proxy) as client:
        assert client.call("GET", "/a?asked=1") == (200, HELLO)
        assert client.answer.headers.get_all("Date") == ["Tue, 01 Jan 2030 00:00:00 GMT"]
    assert upstream.heard().target == "/a?asked=2" and proxy.seen["rewritten"] == 1


def test_a_proxy_that_has_left_is_gone(upstream: Upstream) -> None:
    with Proxy(upstream.port, "s3") as proxy:
        connection = socket.create_connection(("127.0.0.1", proxy.port), timeout=10)
        connection.sendall(upload_head(0))
        assert connection.recv(1000)
    with connection:
        connection.settimeout(10)
        while connection.recv(1000):  # what was on its way, then the end; no end: a timeout
            pass
    with pytest.raises(ConnectionRefusedError), raw(proxy):
        pass


def test_what_a_head_says() -> None:
    head = Head("PUT /a?b=c HTTP/1.1", (("Content-Length", "5"), ("X", "y: z")))
    assert (head.method, head.target, head.get("content-length"), head.get("none")) == ("PUT", "/a?b=c", "5", "")
    assert head.bytes() == b"PUT /a?b=c HTTP/1.1\r\nContent-Length: 5\r\nX: y: z\r\n\r\n"
