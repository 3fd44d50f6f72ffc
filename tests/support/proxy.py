"""A proxy between a storage client and a storage server that delays, throttles, refuses, loses and cuts.

It understands HTTP/1.1 as far as it has to: where a request ends and where its answer does. So it can lose exactly an
answer (the server has done what was asked, the client hears nothing) or cut exactly an upload. It runs in a thread of
its own; what it does can be changed at any moment. Faults are drawn from one seed.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

PIECE = 64 * 1024
SLACK = 0.02
"""Seconds by which a throttled transfer may be behind its rate and still catch up."""

CODES = {
    "s3": {409: "ConditionalRequestConflict", 429: "TooManyRequests", 500: "InternalError", 503: "SlowDown"},
    "gcs": {409: "conflict", 429: "rateLimitExceeded", 500: "backendError", 503: "backendError"},
}


@dataclass(frozen=True)
class Head:
    """The first line and the headers of a request or an answer."""

    first: str
    headers: tuple[tuple[str, str], ...]

    def get(self, name: str) -> str:
        return next((value for key, value in self.headers if key.lower() == name), "")

    @property
    def method(self) -> str:
        return self.first.split(" ", 1)[0]

    @property
    def target(self) -> str:
        """Path and query of a request."""
        return self.first.split(" ")[1]

    @property
    def status(self) -> int:
        return int(self.first.split(" ")[1])

    def bytes(self) -> bytes:
        lines = [self.first, *(f"{key}: {value}" for key, value in self.headers), "", ""]
        return "\r\n".join(lines).encode("latin-1")


@dataclass(frozen=True)
class Faults:
    """What goes wrong. Probabilities are per request."""

    latency: float = 0.0
    """Seconds by which each answer is late."""
    upload_rate: float | None = None
    download_rate: float | None = None
    """Bytes per second, all connections together."""
    statuses: Mapping[int, float] = field(default_factory=dict)
    """Answer with this status instead of passing the request on: status -> probability."""
    lost_answers: float = 0.0
    """The server does what it is asked, and the connection breaks before its answer."""
    resets: float = 0.0
    """An upload breaks somewhere in its body."""
    short_answers: float = 0.0
    """A download breaks in its middle."""
    black_hole: bool = False
    """Requests are taken and never answered."""
    refuse: bool = False
    """Connections break as soon as they are made or used."""
    date: str = ""
    """What answers say instead of the server's own time."""
    rewrite: tuple[str, str] | None = None
    """Text in the requests' targets, and what takes its place."""
    only: Callable[[Head], bool] | None = None
    """Which requests these faults are for; absent: all."""


@dataclass
class Scripted:
    """An answer that the next matching request gets instead of the server's."""

    status: int
    code: str
    matches: Callable[[Head], bool]
    times: int
    headers: tuple[tuple[str, str], ...] = ()


class _Cut(Exception):
    """Raised where the connection to the client is to break."""


class Proxy:
    """Listens on a free port of loopback, in front of `upstream_port`. A context manager."""

    def __init__(self, upstream_port: int, dialect: Literal["s3", "gcs"], seed: int = 0) -> None:
        self.faults = Faults()
        self.seen: Counter[str] = Counter()
        """Requests by method, and faults by kind."""
        self.port = 0
        self._upstream = upstream_port
        self._dialect = dialect
        self._random = random.Random(seed)
        self._scripted: list[Scripted] = []
        self._lock = threading.Lock()
        self._free = {"up": 0.0, "down": 0.0}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def answer_next(
        self,
        status: int,
        code: str,
        matches: Callable[[Head], bool] = lambda head: True,
        times: int = 1,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        """Let the next `times` requests for which `matches` holds be refused with this status and error code."""
        with self._lock:
            self._scripted.append(Scripted(status, code, matches, times, headers))

    def forget(self) -> None:
        """Drop the scripted answers that nobody has had."""
        with self._lock:
            self._scripted.clear()

    def __enter__(self) -> Proxy:
        self._thread.start()
        # Its protocol spelled out, or asyncio does not switch Nagle's algorithm off: 40 ms per answer.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        # Small, so that a throttled client notices: kernels take megabytes in advance.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE)
        listener.bind(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self._server = self._call(asyncio.start_server(self._serve, sock=listener, limit=PIECE))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _close(self) -> None:
        self._server.close()
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    # ---- one connection -----------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        try:
            if self.faults.refuse:
                self.seen["refused connection"] += 1
                raise _Cut
            while (head := await _read_head(reader)) is not None:
                if server is None or server[0].at_eof() or server[1].is_closing():
                    _close(server)
                    server = await asyncio.open_connection("127.0.0.1", self._upstream, limit=PIECE)
                if not await self._exchange(head, reader, writer, *server):
                    break
        except (_Cut, OSError, asyncio.IncompleteReadError):
            _reset(writer)
        except asyncio.CancelledError:
            pass
        finally:
            _close(server)
            writer.close()

    async def _exchange(
        self,
        head: Head,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        from_server: asyncio.StreamReader,
        to_server: asyncio.StreamWriter,
    ) -> bool:
        """Handle one request; tell whether the connection goes on."""
        faults = self.faults if self.faults.only is None or self.faults.only(head) else Faults()
        with self._lock:
            self.seen[head.method] += 1
            scripted = next((one for one in self._scripted if one.times > 0 and one.matches(head)), None)
            if scripted is not None:
                scripted.times -= 1
            status = self._drawn_status(faults)
            lost, cut = (self._random.random() < chance for chance in (faults.lost_answers, faults.resets))
            cut_at = self._random.random()
        if head.get("expect"):
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = self._throttled(_body(head, reader), "up", faults.upload_rate)
        if faults.refuse:
            self.seen["refused request"] += 1
            raise _Cut
        if faults.black_hole:
            self.seen["black hole"] += 1
            async for _ in body:
                pass
            await asyncio.sleep(3600)  # a timer, unlike an event that nobody holds, keeps this task alive
        if scripted is not None or status:
            async for _ in body:
                pass
            self.seen["scripted" if scripted is not None else str(status)] += 1
            writer.write(self._refusal(head, scripted or Scripted(status, CODES[self._dialect][status], bool, 0)))
            await writer.drain()
            return True
        kept = tuple(pair for pair in head.headers if pair[0].lower() != "expect")
        first = head.first
        if faults.rewrite is not None and faults.rewrite[0] in first:
            self.seen["rewritten"] += 1
            first = first.replace(*faults.rewrite)
        to_server.write(Head(first, kept).bytes())
        limit = int(cut_at * int(head.get("content-length") or 0)) if cut else None
        await self._pass(body, to_server, limit)
        return await self._answer(head, writer, from_server, faults, lost)

    async def _pass(self, body: AsyncIterator[bytes], to_server: asyncio.StreamWriter, limit: int | None) -> None:
        sent = 0
        async for piece in self._noticing(body):
            if limit is not None and sent + len(piece) > limit:
                to_server.write(piece[: limit - sent])
                await to_server.drain()
                self.seen["cut upload"] += 1
                raise _Cut
            to_server.write(piece)
            sent += len(piece)
            await to_server.drain()

    async def _noticing(self, body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Pass an upload's pieces on; count it when the client is gone before their end."""
        try:
            async for piece in body:
                yield piece
        except (OSError, asyncio.IncompleteReadError):
            self.seen["client vanished"] += 1
            raise

    async def _answer(
        self, head: Head, writer: asyncio.StreamWriter, from_server: asyncio.StreamReader, faults: Faults, lost: bool
    ) -> bool:
        answer = await _read_head(from_server)
        while answer is not None and answer.status == 100:
            answer = await _read_head(from_server)
        if answer is None:
            raise _Cut
        if faults.latency:
            await asyncio.sleep(faults.latency)
        bodiless = head.method == "HEAD" or answer.status in (204, 304)
        ends = bodiless or answer.get("content-length") or answer.get("transfer-encoding")
        pieces = _nothing() if bodiless else _body(answer, from_server, until_closed=not ends)
        pieces = self._throttled(pieces, "down", faults.download_rate)
        if lost:
            async for _ in pieces:
                pass
            self.seen["lost answer"] += 1
            raise _Cut
        if faults.date:
            others = tuple(pair for pair in answer.headers if pair[0].lower() != "date")
            answer = Head(answer.first, (*others, ("Date", faults.date)))
        writer.write(answer.bytes())
        if self._random.random() < faults.short_answers and not bodiless:
            self.seen["short answer"] += 1
            writer.write((await anext(pieces, b""))[:-1])
            await writer.drain()
            raise _Cut
        async for piece in pieces:
            writer.write(piece)
            await writer.drain()
        await writer.drain()
        return bool(ends) and answer.get("connection").lower() != "close"

    # ---- faults -------------------------------------------------------------------------------------------------

    def _drawn_status(self, faults: Faults) -> int:
        drawn = self._random.random()
        for status, chance in faults.statuses.items():
            if drawn < chance:
                return status
            drawn -= chance
        return 0

    def _refusal(self, head: Head, answer: Scripted) -> bytes:
        if self._dialect == "s3":
            kind = "application/xml"
            body = f"<?xml version='1.0'?><Error><Code>{answer.code}</Code><Message>no</Message></Error>"
        else:
            kind = "application/json"
            body = (
                f'{{"error": {{"code": {answer.status}, "message": "{answer.code}", '
                f'"errors": [{{"reason": "{answer.code}"}}]}}}}'
            )
        if head.method == "HEAD":
            body = ""
        headers = (("Content-Type", kind), ("Content-Length", str(len(body))), *answer.headers)
        return Head(f"HTTP/1.1 {answer.status} Refused", headers).bytes() + body.encode()

    async def _throttled(self, pieces: AsyncIterator[bytes], way: str, rate: float | None) -> AsyncIterator[bytes]:
        """Yield pieces no faster than `rate`, which all connections share."""
        async for piece in pieces:
            if rate is not None:
                now = time.monotonic()
                # A sleep that took too long is made up for, or one connection alone would not get all of the rate.
                self._free[way] = max(now - SLACK, self._free[way]) + len(piece) / rate
                await asyncio.sleep(max(0.0, self._free[way] - now))
            yield piece


async def _read_head(reader: asyncio.StreamReader) -> Head | None:
    """Return the next head, None at the end of the connection."""
    try:
        text = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    first, *lines = text.rstrip("\r\n").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return Head(first, tuple((key, value.strip()) for key, _, value in pairs))


async def _nothing() -> AsyncIterator[bytes]:
    for piece in ():
        yield piece


async def _body(head: Head, reader: asyncio.StreamReader, until_closed: bool = False) -> AsyncIterator[bytes]:
    """Yield a body as it is on the wire, chunk marks included."""
    if head.get("transfer-encoding").lower() == "chunked":
        while True:
            mark = await reader.readuntil(b"\r\n")
            size = int(mark.split(b";")[0], 16)
            yield mark
            left = size + 2
            while left:
                piece = await reader.readexactly(min(left, PIECE))
                left -= len(piece)
                yield piece
            if size == 0:
                return
    left = int(head.get("content-length") or 0)
    while left or until_closed:
        piece = await reader.read(PIECE if until_closed else min(left, PIECE))
        if not piece:
            if until_closed:
                return
            raise asyncio.IncompleteReadError(b"", left)
        left -= 0 if until_closed else len(piece)
        yield piece


def _close(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None) -> None:
    if connection is not None:
        connection[1].close()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Break a connection as a crashed router does: with a reset, not with a farewell."""
    found = writer.get_extra_info("socket")
    with suppress(OSError):  # closed already: the client was faster
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
