"""Google Cloud Storage in memory, for what fake-gcs-server leaves out.

Conditions hold on every kind of upload, on reads and on deletes; hashes are checked; names may be written once per
second only; credentials may be unknown or lack a right; the clock may be wrong. It runs in a thread of its own. All
requests are handled by that thread, and nothing waits between a condition and the write that it is for.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import json
import re
import threading
import time
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.message import Message
from email.utils import formatdate
from types import TracebackType
from typing import Any
from urllib.parse import quote

import google_crc32c
from aiohttp import web
from aiohttp.typedefs import Handler

QUANTUM = 256 * 1024
"""Pieces of a resumable upload are kept in multiples of this, except for the last one."""
PAGE = 1000


class Refusal(Exception):
    """Raised for an answer that is an error."""

    def __init__(self, status: int, reason: str, message: str, **details: str) -> None:
        super().__init__(message)
        self.status = status
        self.error = {"message": message, "domain": "global", "reason": reason} | details

    def answer(self) -> web.Response:
        if self.status == 304:
            return web.Response(status=304)
        error = {"code": self.status, "message": self.error["message"], "errors": [self.error]}
        return web.json_response({"error": error}, status=self.status)


@dataclass(frozen=True)
class Stored:
    """One version of an object."""

    bucket: str
    name: str
    data: bytes
    generation: int
    about: Mapping[str, Any]
    """What its writer said of it: contentType, metadata and so on."""
    hashes: Mapping[str, str]

    def resource(self) -> dict[str, Any]:
        written = datetime.fromtimestamp(self.generation / 1e6, UTC).isoformat(timespec="milliseconds")
        return {
            "contentType": "application/octet-stream",
            **self.about,
            **self.hashes,
            "kind": "storage#object",
            "id": f"{self.bucket}/{self.name}/{self.generation}",
            "bucket": self.bucket,
            "name": self.name,
            "size": str(len(self.data)),
            "generation": str(self.generation),
            "metageneration": "1",
            "etag": _encoded(str(self.generation).encode()),
            "timeCreated": written.replace("+00:00", "Z"),
            "updated": written.replace("+00:00", "Z"),
        }


@dataclass
class Upload:
    """A resumable upload. It is no object before it is whole."""

    bucket: str
    about: Mapping[str, Any]
    query: Mapping[str, str]
    data: bytearray = field(default_factory=bytearray)
    stored: Stored | None = None


class GcsServer:
    """Listens on a free port of loopback. A context manager; its attributes may be changed while it runs."""

    def __init__(
        self,
        buckets: Iterable[str] = (),
        one_write_per_second: bool = False,
        tokens: frozenset[str] | None = None,
        forbidden: frozenset[str] = frozenset(),
    ) -> None:
        self.one_write_per_second = one_write_per_second
        """Refuse a change of a name within a second of the last one."""
        self.tokens = tokens
        """Bearer tokens that are known; absent: nobody is asked for any."""
        self.forbidden = forbidden
        """Bearer tokens that are known and may do nothing."""
        self.clock_offset = 0.0
        """Seconds by which the Date of answers is ahead."""
        self.port = 0
        self._objects: dict[str, dict[str, Stored]] = {}
        self._settings: dict[str, dict[str, Any]] = {}
        self._uploads: dict[str, Upload] = {}
        self._changed: dict[tuple[str, str], float] = {}
        self._generation = 0
        self._numbers = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        for bucket in buckets:
            self.create_bucket(bucket)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def create_bucket(self, name: str, **settings: Any) -> None:
        """Create an empty bucket; `settings` as the API names them: location, softDeletePolicy, versioning."""
        self._settings[name] = {"kind": "storage#bucket", "id": name, "location": "US", **settings, "name": name}
        self._objects[name] = {}

    def __enter__(self) -> GcsServer:
        self._thread.start()
        self._runner = web.AppRunner(self._application(), access_log=None, shutdown_timeout=1.0)
        self._call(self._listen())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _listen(self) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]

    async def _close(self) -> None:
        # A connection that is just being accepted would outlive a listener that closes before it is made.
        await asyncio.sleep(0)
        await self._runner.cleanup()
        await asyncio.sleep(0)  # transports close in the loop's next round

    def _application(self) -> web.Application:
        application = web.Application(middlewares=[self._frame], client_max_size=0)
        route = application.router
        route.add_post("/storage/v1/b", self._make_bucket)
        route.add_get("/storage/v1/b/{bucket}", self._read_bucket)
        route.add_get("/storage/v1/b/{bucket}/o", self._list)
        route.add_get("/storage/v1/b/{bucket}/o/{name:.+}", self._read)
        route.add_get("/download/storage/v1/b/{bucket}/o/{name:.+}", self._read)
        route.add_delete("/storage/v1/b/{bucket}/o/{name:.+}", self._delete)
        route.add_post("/upload/storage/v1/b/{bucket}/o", self._upload)
        route.add_put("/upload/storage/v1/b/{bucket}/o", self._upload)
        route.add_delete("/upload/storage/v1/b/{bucket}/o", self._cancel)
        return application

    # ---- every request ------------------------------------------------------------------------------------------

    @web.middleware
    async def _frame(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        # Whole, before anything is decided: what breaks off in its middle has no effect.
        try:
            await request.read()
            self._admit(request)
            answer = await handler(request)
        except Refusal as refusal:
            answer = refusal.answer()
        except ConnectionResetError:
            answer = web.Response(status=400)  # nobody hears it
        answer.headers["Date"] = formatdate(time.time() + self.clock_offset, usegmt=True)
        return answer

    def _admit(self, request: web.Request) -> None:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if token in self.forbidden:
            right = _right(request)
            kind = "object" if ".objects." in right and not right.endswith("list") else "bucket"
            raise Refusal(
                403,
                "forbidden",
                f"someone@example.com does not have {right} access to the Google Cloud Storage {kind}. "
                f"Permission '{right}' denied on resource (or it may not exist).",
            )
        if self.tokens is not None and token not in self.tokens:
            raise Refusal(
                401, "authError", "Invalid Credentials", locationType="header", location="Authorization"
            )  # fmt: skip

    def _in_bucket(self, request: web.Request) -> dict[str, Stored]:
        try:
            return self._objects[request.match_info["bucket"]]
        except KeyError:
            raise Refusal(404, "notFound", "The specified bucket does not exist.") from None

    def _found(self, request: web.Request) -> Stored:
        """Return the object that is asked for, if the request's conditions hold."""
        found = self._in_bucket(request).get(request.match_info["name"])
        asked = _number(request.query, "generation")
        if found is None or asked not in (None, found.generation):
            raise Refusal(404, "notFound", "No such object: {bucket}/{name}".format(**request.match_info))
        _check_conditions(request.query, found.generation, 304 if request.method in ("GET", "HEAD") else 412)
        return found

    def _count_change(self, bucket: str, name: str) -> None:
        """Refuse a change that comes too soon after the last one."""
        now = time.monotonic()
        if self.one_write_per_second and now - self._changed.get((bucket, name), -1e9) < 1.0:
            raise Refusal(
                429,
                "rateLimitExceeded",
                f"The object {bucket}/{name} exceeded the rate limit for object mutation operations (create, update, "
                "and delete). Please reduce your request rate. See https://cloud.google.com/storage/docs/gcs429.",
                domain="usageLimits",
            )
        self._changed[bucket, name] = now

    # ---- buckets and objects ------------------------------------------------------------------------------------

    async def _make_bucket(self, request: web.Request) -> web.Response:
        about = _parsed(await request.read())
        name = _name(about, {})
        if name in self._objects:
            raise Refusal(409, "conflict", "Your previous request to create the named bucket succeeded.")
        self.create_bucket(**about)
        return web.json_response(self._settings[name])

    async def _read_bucket(self, request: web.Request) -> web.Response:
        self._in_bucket(request)
        return web.json_response(self._settings[request.match_info["bucket"]])

    async def _list(self, request: web.Request) -> web.Response:
        query = request.query
        prefix, delimiter, start = (query.get(part, "") for part in ("prefix", "delimiter", "startOffset"))
        limit = PAGE if "maxResults" not in query else _number(query, "maxResults")
        if not limit or limit < 0:
            raise Refusal(400, "invalid", f"Invalid value for maxResults: {limit}")
        after = _decoded(query.get("pageToken", ""))
        entries: dict[str, Stored | None] = {}
        for name, stored in sorted(self._in_bucket(request).items()):
            if not name.startswith(prefix) or name < start:
                continue
            cut = name.find(delimiter, len(prefix)) if delimiter else -1
            # Everything below a delimiter is one entry, which counts and is turned over like an object.
            entries |= {name: stored} if cut < 0 else {name[: cut + len(delimiter)]: None}
        rest = [entry for entry in entries if entry > after]
        page = rest[: min(limit, PAGE)]
        items = [found.resource() for entry in page if (found := entries[entry]) is not None]
        prefixes = [entry for entry in page if entries[entry] is None]
        more = {"nextPageToken": _encoded(page[-1].encode())} if len(page) < len(rest) else {}
        # What would be empty is left out.
        parts = {name: part for name, part in (("items", items), ("prefixes", prefixes)) if part}
        return web.json_response({"kind": "storage#objects", **parts, **more})

    async def _read(self, request: web.Request) -> web.Response:
        found = self._found(request)
        if request.query.get("alt") != "media":
            return web.json_response(found.resource())
        size, headers = len(found.data), _media_headers(found)
        try:
            first, end, _ = request.http_range.indices(size)
        except ValueError:  # what nobody understands is not asked for
            return web.Response(body=found.data, headers=headers)
        if "Range" not in request.headers:
            return web.Response(body=found.data, headers=headers)
        if first >= size:
            raise Refusal(416, "requestedRangeNotSatisfiable", "Request range not satisfiable")
        headers["Content-Range"] = f"bytes {first}-{end - 1}/{size}"
        return web.Response(status=206, body=found.data[first:end], headers=headers)

    async def _delete(self, request: web.Request) -> web.Response:
        found = self._found(request)
        self._count_change(found.bucket, found.name)
        del self._in_bucket(request)[found.name]
        return web.Response(status=204)

    # ---- uploads ------------------------------------------------------------------------------------------------

    async def _upload(self, request: web.Request) -> web.Response:
        self._in_bucket(request)
        bucket, query, data = request.match_info["bucket"], request.query, await request.read()
        if "upload_id" in query:
            return self._continue(self._begun(request), request.headers.get("Content-Range", ""), data)
        kind = query.get("uploadType")
        if kind == "resumable":
            return self._begin(request, _parsed(data) if data else {})
        if kind == "multipart":
            about, data = _parts(request.headers.get("Content-Type", ""), data)
        elif kind == "media":
            about = {"contentType": request.headers.get("Content-Type", "application/octet-stream")}
        else:
            raise Refusal(400, "invalid", f"Invalid upload type: {kind}")
        return web.json_response(self._write(bucket, about, query, data).resource())

    def _write(self, bucket: str, about: Mapping[str, Any], query: Mapping[str, str], data: bytes) -> Stored:
        name = _name(about, query)
        found = self._objects[bucket].get(name)
        _check_conditions(query, found.generation if found else 0, 412)
        hashes = {
            "md5Hash": _encoded(hashlib.md5(data).digest()),
            "crc32c": _encoded(google_crc32c.value(data).to_bytes(4, "big")),
        }
        for key, title in (("md5Hash", "MD5 hash"), ("crc32c", "CRC32C")):
            if about.get(key, hashes[key]) != hashes[key]:
                said = f'Provided {title} "{about[key]}" doesn\'t match calculated {title} "{hashes[key]}".'
                raise Refusal(400, "invalid", said)
        self._count_change(bucket, name)
        self._generation = max(self._generation + 1, time.time_ns() // 1000)
        stored = Stored(bucket, name, data, self._generation, about, hashes)
        self._objects[bucket][name] = stored
        return stored

    def _begin(self, request: web.Request, about: dict[str, Any]) -> web.Response:
        bucket, query = request.match_info["bucket"], dict(request.query)
        name = _name(about, query)
        found = self._objects[bucket].get(name)
        _check_conditions(query, found.generation if found else 0, 412)
        about = {"contentType": request.headers.get("X-Upload-Content-Type", "application/octet-stream")} | about
        number = f"upload-{next(self._numbers)}"
        self._uploads[number] = Upload(bucket, about, query)
        # By the address that the client used, so that it stays behind whatever stands in between.
        place = f"{request.scheme}://{request.host}{request.path}?uploadType=resumable"
        headers = {
            "Location": f"{place}&name={quote(name, safe='')}&upload_id={number}",
            "X-GUploader-UploadID": number,
        }
        return web.Response(headers=headers)

    def _begun(self, request: web.Request) -> Upload:
        try:
            return self._uploads[request.query["upload_id"]]
        except KeyError:
            raise Refusal(404, "notFound", "No such upload") from None

    def _continue(self, upload: Upload, header: str, data: bytes) -> web.Response:
        """Take the next piece of an upload, or tell how much of it is here."""
        if upload.stored is None and _took_all(upload, header, data):
            upload.stored = self._write(upload.bucket, upload.about, upload.query, bytes(upload.data))
        if upload.stored is not None:
            return web.json_response(upload.stored.resource())
        here = {"Range": f"bytes=0-{len(upload.data) - 1}"} if upload.data else {}
        return web.Response(status=308, headers=here)

    async def _cancel(self, request: web.Request) -> web.Response:
        self._begun(request)
        del self._uploads[request.query["upload_id"]]
        return web.Response(status=499)


def _took_all(upload: Upload, header: str, data: bytes) -> bool:
    """Take what is new in a piece of an upload; tell whether nothing is missing."""
    found = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", header or f"bytes 0-{len(data) - 1}/{len(data)}")
    if header and found is None:
        raise Refusal(400, "invalid", f"Failed to parse Content-Range header: {header}")
    # Without a range: everything at once, and possibly nothing.
    first, last, total = (-1 if part in (None, "*") else int(part) for part in (found.groups() if found else "**0"))
    here, size = len(upload.data), None if total < 0 else total
    if first < 0:
        return size == here
    end = first + len(data)
    if last + 1 != end or first > here or end > (end if size is None else size):
        raise Refusal(400, "invalid", f"Invalid request. {len(data)} bytes do not fit {header} after {here} bytes.")
    if size != end and len(data) < QUANTUM:
        raise Refusal(
            400,
            "invalid",
            "Invalid request. The number of bytes uploaded is required to be equal or greater than 262144, except for "
            "the final request (it's recommended to be the exact multiple of 262144). The received request contained "
            f"{len(data)} bytes, which does not meet this requirement.",
        )
    # A piece that is sent again, since its answer got lost, adds nothing.
    upload.data += data[here - first :]
    if size != end:
        del upload.data[len(upload.data) // QUANTUM * QUANTUM :]
    return size == len(upload.data)


def _check_conditions(query: Mapping[str, str], generation: int, unchanged: int) -> None:
    """Raise the refusal of a condition that does not hold; no object: generation 0."""
    if unknown := [part for part in query if re.match("if(?!Generation(Not)?Match$)", part)]:
        raise Refusal(501, "notImplemented", f"This server does not know {unknown[0]}")
    said = "At least one of the pre-conditions you specified did not hold."
    where = {"locationType": "header", "location": "If-Match"}
    if _number(query, "ifGenerationMatch") not in (None, generation):
        raise Refusal(412, "conditionNotMet", said, **where)
    differs = _number(query, "ifGenerationNotMatch")
    # Without an object, this condition never holds.
    if differs is not None and generation in (0, differs):
        raise Refusal(unchanged, "conditionNotMet", said, **where)


def _number(query: Mapping[str, str], part: str) -> int | None:
    try:
        return int(query[part]) if part in query else None
    except ValueError:
        raise Refusal(400, "invalid", f"Invalid value for {part}: {query[part]}") from None


def _name(about: Mapping[str, Any], query: Mapping[str, str]) -> str:
    name = query.get("name") or about.get("name")
    if not name:
        raise Refusal(400, "required", "Required")
    return str(name)


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError):
        raise Refusal(400, "parseError", "Parse Error") from None


def _parts(kind: str, body: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the metadata and the data of a multipart upload."""
    message = Message()
    message["Content-Type"] = kind
    mark = b"--" + str(message.get_param("boundary", "")).encode()
    # The ends of lines are part of the marks between data: which kind they are decides where the data end.
    line = b"\r\n" if body[len(mark) :].startswith(b"\r\n") else b"\n"
    pieces = (line + body).split(line + mark)
    if len(pieces) != 4 or not pieces[3].startswith(b"--"):
        raise Refusal(400, "badRequest", "Malformed multipart body.")
    (_, _, about), (head, _, data) = (piece.removeprefix(line).partition(line + line) for piece in pieces[1:3])
    given = re.search(rb"(?im)^content-type: *(.+?)\r?$", head)
    return ({"contentType": given[1].decode()} if given else {}) | _parsed(about), data


def _media_headers(stored: Stored) -> dict[str, str]:
    return {
        "Content-Type": str(stored.about.get("contentType", "application/octet-stream")),
        "ETag": f'"{stored.resource()["etag"]}"',
        "x-goog-generation": str(stored.generation),
        "x-goog-metageneration": "1",
        "x-goog-stored-content-length": str(len(stored.data)),
        "x-goog-hash": f"crc32c={stored.hashes['crc32c']},md5={stored.hashes['md5Hash']}",
    }


def _right(request: web.Request) -> str:
    """Return the name of the right that a request needs."""
    if request.path.startswith("/upload/"):
        return "storage.objects.create"
    if request.method == "DELETE":
        return "storage.objects.delete"
    if request.method == "POST":
        return "storage.buckets.create"
    if "name" in request.match_info:
        return "storage.objects.get"
    return "storage.objects.list" if request.path.endswith("/o") else "storage.buckets.get"


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _decoded(token: str) -> str:
    try:
        return base64.b64decode(token, validate=True).decode()
    except ValueError:
        raise Refusal(400, "invalid", "Invalid argument.") from None
