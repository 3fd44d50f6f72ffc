"""`gs://`: a bucket of Google Cloud Storage, through its JSON API.

gcsfs brings credentials and connections. Requests are made here: its own verbs know the condition "only if absent" for
some kinds of upload and not for others, and repeat an upload in a way that may append to it.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from diloco_runtime.clock import SystemNonces
from diloco_runtime.store_address import Address
from diloco_runtime.store_cloud import (
    CHUNK,
    LIMITS,
    BucketFacts,
    Limits,
    Page,
    Trouble,
    date_seconds,
    network_trouble,
    read_all,
)

if TYPE_CHECKING:
    import aiohttp
    import gcsfs

_CONNECT_SECONDS = 10.0
_NO_KEYS = "give it credentials: `gcloud auth application-default login`, or [store] credentials"
_CLOCK = Trouble("permanent", "this machine's clock is wrong", "set it; timedatectl shows it")
_BUSY = Trouble("again", "it is overloaded or asks for fewer requests", "try again later")
_REFUSED = Trouble("expired", "it does not accept these credentials", _NO_KEYS)
_SLOWER = ("rateLimitExceeded", "userRateLimitExceeded", "backendError")


class Refused(Exception):
    """Raised for an answer that is an error; keeps what the service said."""

    def __init__(self, status: int, message: str, reason: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.message = message
        self.reason = reason


class MissingCredentials(Exception):
    """Raised when the credentials are not where the store's address says."""


class GcsDriver:
    """Requests to one bucket through aiohttp."""

    phantom_folders = False

    def __init__(self, address: Address, limits: Limits = LIMITS) -> None:
        self._address = address
        self._limits = limits
        self._files: gcsfs.GCSFileSystem | None = None
        self._nonces = SystemNonces()
        self._base = f"{address.endpoint or 'https://storage.googleapis.com'}".rstrip("/")
        self._objects = f"/storage/v1/b/{quote(address.bucket, safe='')}/o"

    async def get(self, name: str) -> bytes | None:
        try:
            async with self._request("GET", self._object(name), {"alt": "media"}) as answer:
                data = await read_all(answer.content.iter_chunked(CHUNK), self._limits)
        except Refused as refused:
            if refused.status == 404 and not _is_about_bucket(refused):
                return None
            raise
        if answer.content_length not in (None, len(data)):
            raise ConnectionError(f"{len(data)} of {answer.content_length} bytes came")
        return data

    async def put(self, name: str, data: bytes, new: bool) -> None:
        boundary = f"diloco-{self._nonces.new()}"
        # What anybody may read, the service would let caches keep for an hour; a heartbeat must not be an hour old.
        about = json.dumps({"name": name, "cacheControl": "no-store"})
        head = (
            f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{about}\r\n"
            f"--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
        ).encode()
        tail = f"\r\n--{boundary}--\r\n".encode()
        # One multipart request, also for what is large: conditions hold for it, and nothing is ever half there.
        options = {"uploadType": "multipart"} | ({"ifGenerationMatch": "0"} if new else {})
        headers = {
            "Content-Type": f"multipart/related; boundary={boundary}",
            "Content-Length": str(len(head) + len(data) + len(tail)),
        }
        body = _pieces(head, data, tail)
        async with self._request("POST", f"/upload{self._objects}", options, headers, body) as answer:
            stored = json.loads(await answer.read())
        if int(stored.get("size", len(data))) != len(data):
            raise ConnectionError(f"{stored['size']} of {len(data)} bytes were stored")

    async def page(self, prefix: str, delimiter: str, token: str, limit: int) -> Page:
        options = {"prefix": prefix, "maxResults": str(limit), "fields": "items(name),prefixes,nextPageToken"}
        options |= {"delimiter": delimiter} if delimiter else {}
        options |= {"pageToken": token} if token else {}
        async with self._request("GET", self._objects, options) as answer:
            found = json.loads(await answer.read())
        names = [item["name"] for item in found.get("items", [])]
        return Page(names, found.get("prefixes", []), found.get("nextPageToken", ""))

    async def delete(self, name: str) -> None:
        try:
            async with self._request("DELETE", self._object(name), {}):
                pass
        except Refused as refused:
            if refused.status != 404 or _is_about_bucket(refused):
                raise

    def session(self) -> object:
        return self._files

    def renew(self, session: object) -> None:
        # Of many requests that are refused together, the first one renews for all.
        if self._files is session:
            self._files = None

    async def server_time(self) -> float | None:
        async with self._request("GET", self._objects, {"maxResults": "1"}) as answer:
            return date_seconds(answer.headers.get("Date", ""))

    async def bucket_facts(self) -> BucketFacts:
        fields = {"fields": "location,softDeletePolicy,versioning"}
        try:
            async with self._request("GET", self._objects.removesuffix("/o"), fields) as answer:
                found = json.loads(await answer.read())
        except Refused:
            return BucketFacts()  # reading a bucket's settings is a right of its own
        seconds = int(found.get("softDeletePolicy", {}).get("retentionDurationSeconds", 0))
        keeps = ""
        if seconds:
            keeps = f"the bucket keeps deleted objects for {seconds / 86400:.0f} more days (soft delete), which cost"
        elif found.get("versioning", {}).get("enabled"):
            keeps = "the bucket keeps deleted objects as old versions (object versioning), which cost"
        remedy = " like any other; nearly everything a run writes is deleted soon: turn that off for this bucket"
        return BucketFacts(str(found.get("location", "")).lower(), keeps + remedy if keeps else "")

    # ---- requests -----------------------------------------------------------------------------------------------

    def _object(self, name: str) -> str:
        return f"{self._objects}/{quote(name, safe='')}"

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        options: dict[str, str],
        headers: dict[str, str] | None = None,
        body: AsyncIterator[bytes | memoryview] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Make a request; raise `Refused` for an answer that is an error."""
        import aiohttp
        from yarl import URL

        files = await self._connected()
        session = await files._set_session()
        sent = await self._with_token(files, headers or {})
        limits = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=self._limits.stall)
        query = "&".join(f"{name}={quote(value, safe='')}" for name, value in options.items())
        # `encoded`: slashes inside an object's name must stay %2F.
        url = URL(f"{self._base}{path}?{query}", encoded=True)
        async with session.request(method, url, data=body, headers=sent, timeout=limits) as answer:
            if answer.status >= 300:
                raise _refused(answer.status, await answer.read())
            yield answer

    async def _connected(self) -> gcsfs.GCSFileSystem:
        if self._files is None:
            # Finding credentials may ask a metadata server, and does so without asyncio.
            self._files = await asyncio.wait_for(asyncio.to_thread(_file_system, self._address), 2 * self._limits.stall)
        return self._files

    async def _with_token(self, files: gcsfs.GCSFileSystem, headers: dict[str, str]) -> dict[str, str]:
        """Add the bearer token, renewed when it is about to expire."""
        if files.credentials.credentials is not None:
            # Renewing is a request of its own, made without asyncio: it must not hold up all others.
            await asyncio.wait_for(asyncio.to_thread(files.credentials.apply, headers), 2 * self._limits.stall)
        return headers

    def judge(self, error: Exception) -> Trouble:
        import google.auth.exceptions
        from gcsfs.retry import HttpError

        if isinstance(error, Refused):
            return _judge_answer(error)
        if isinstance(error, MissingCredentials):
            return Trouble("permanent", str(error), _NO_KEYS)
        cause = error.__cause__ if isinstance(error, HttpError) else error
        if isinstance(cause, google.auth.exceptions.TransportError):
            return Trouble("again", "the credentials' own service does not answer", "check the network")
        if isinstance(cause, google.auth.exceptions.RefreshError):
            return _CLOCK if "reasonable timeframe" in str(cause) else _REFUSED
        if isinstance(cause, google.auth.exceptions.DefaultCredentialsError):
            return Trouble("permanent", "no credentials were found", _NO_KEYS)
        if found := network_trouble(error):
            return found
        if isinstance(cause, google.auth.exceptions.GoogleAuthError | ValueError):
            return Trouble("permanent", f"the credentials cannot be used ({type(cause).__name__})", _NO_KEYS)
        return Trouble("permanent", f"{type(error).__name__}: {error}", "see --debug")


async def _pieces(head: bytes, data: bytes, tail: bytes) -> AsyncIterator[bytes | memoryview]:
    """Yield a body piece by piece, so that other requests get their turns and nothing is copied."""
    yield head
    view = memoryview(data)
    for start in range(0, len(view), CHUNK):
        yield view[start : start + CHUNK]
    yield tail


def _refused(status: int, body: bytes) -> Refused:
    """Read what the service says of an error."""
    message = body[:500].decode(errors="replace").strip()
    reason = ""
    try:
        error = json.loads(body)["error"]
        message = str(error["message"])
        reason = str(error["errors"][0]["reason"])
    except (ValueError, LookupError, TypeError):
        pass  # a proxy's page, or plain text
    return Refused(status, message, reason)


def _is_about_bucket(refused: Refused) -> bool:
    return "bucket" in refused.message.lower() and "no such object" not in refused.message.lower()


def _judge_answer(refused: Refused) -> Trouble:
    """Tell what a refusal of the service means."""
    status = refused.status
    if status == 412:
        return Trouble("taken", "it exists")
    if status == 401:
        return _REFUSED
    if refused.reason in _SLOWER or status in (408, 409, 429) or (status >= 500 and status not in (501, 507)):
        return _BUSY
    if status == 403 and "quota" in refused.reason.lower() or status == 507:
        return Trouble("permanent", "no space or quota is left", "free or buy some space there")
    if status == 403:
        return Trouble(
            "permanent", "access denied", "let these credentials read, write, list and delete objects there "
            "(role Storage Object User)"
        )  # fmt: skip
    if status == 404:
        return Trouble("permanent", "there is no such bucket", "create it, or correct [run] store")
    return Trouble("permanent", f"{status} {refused.message}", "check [run] store and [store]")


def _file_system(address: Address) -> gcsfs.GCSFileSystem:
    # Otherwise every first request asks what kind of bucket this is, through another protocol, and waits up to a
    # minute for an answer where there is none. It is read when gcsfs is imported.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    import gcsfs

    token = _token(address.credentials)
    try:
        return gcsfs.GCSFileSystem(
            token=token, endpoint_url=address.endpoint or None, use_listings_cache=False, skip_instance_cache=True
        )
    except (LookupError, TypeError, ValueError):
        if address.credentials in ("", "anonymous", "machine"):
            raise
        # Without the cause: its text may be taken from the key.
        raise MissingCredentials(f"{address.credentials} holds no key that can be used") from None


def _token(source: str) -> str | dict[str, Any]:
    """Return what gcsfs takes for credentials from `source`; raise `MissingCredentials` when nothing is there."""
    kind, _, place = source.partition(":")
    if kind == "file":
        path = os.path.expanduser(place)
        if not os.path.isfile(path):
            raise MissingCredentials(f"there is no file {place}")
        return path
    if kind == "env":
        try:
            found = json.loads(os.environ[place])
        except KeyError as error:
            raise MissingCredentials(f"{place} is not set") from error
        except ValueError:
            found = None
        if not isinstance(found, dict):
            # Without the cause: a decoder's error holds the text, which is a secret.
            raise MissingCredentials(f"{place} does not hold a key file's JSON") from None
        return found
    return {"anonymous": "anon", "machine": "cloud"}.get(source, "google_default")
