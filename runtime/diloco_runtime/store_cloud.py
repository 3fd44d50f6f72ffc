"""What all bucket services share: deadlines, tries, what an error means, listings to their end. `s3://` and `gs://`.

A `Driver` makes one request to one service (`store_s3.py`, `store_gcs.py`) and tells what an error of its library
means; `CloudStore` decides whether to try again. s3fs and gcsfs bring the sessions and the credentials; their
file-system verbs are not used, for several of them answer from a cache, take a failed listing for an empty one, or turn
an empty body into a truncation.

The libraries repeat requests by themselves, and a lost answer cannot be told from a lost request. So "already there"
may be one's own first write, and after any failed write the outcome is unknown: `Blackboard.create` reads back.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Literal, Protocol, TypeVar

from fsspec.asyn import get_loop

from diloco_runtime.errors import StoreUnavailable
from diloco_runtime.store import AlreadyExists, Names, check_body, check_key, check_prefix, is_key
from diloco_runtime.store_address import Address

T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds between tries: doubled each time, and drawn at random, so that islands that failed together do not return
together."""
CHUNK = 1 << 20
"""Bytes taken at once from a download."""
DELETES_AT_ONCE = 16
CONNECTIONS = 32


@dataclass(frozen=True)
class Limits:
    """How long a request is waited for."""

    stall: float = 15.0
    """Seconds without a byte after which a request counts as failed."""
    slowest: float = 32 * 1024
    """Bytes per second below which, on average and after `stall`, a transfer counts as failed."""
    patience: float = 30.0
    """Seconds after its first try in which a verb begins another one. Whoever calls may have more; a person has not."""


LIMITS = Limits()


@dataclass(frozen=True)
class Trouble:
    """What an error of a storage library means."""

    kind: Literal["taken", "again", "expired", "permanent"]
    """taken: the key exists. again: try again. expired: once more with new credentials. permanent: tell the user."""
    words: str
    remedy: str = ""


NO_ANSWER = Trouble("again", "no answer in time", "check the endpoint and the network")


@dataclass(frozen=True)
class Page:
    """One page of a listing: whole names, names of folders (each ending in a slash), and the next page's token."""

    names: Names
    folders: Names
    token: str = ""


@dataclass(frozen=True)
class BucketFacts:
    """What a bucket's own settings say; empty: unknown, or these credentials may not ask."""

    region: str = ""
    keeps_deleted: str = ""
    """A warning, when objects go on costing money after they are deleted."""


class Driver(Protocol):
    """Requests to one bucket, one each, inside the storage loop. Names are whole object names."""

    phantom_folders: bool
    """Whether the service may list folders that have nothing in them."""

    async def get(self, name: str) -> bytes | None:
        """Return an object, None when there is none."""

    async def put(self, name: str, data: bytes, new: bool) -> None:
        """Write an object; `new`: only if there is none."""

    async def page(self, prefix: str, delimiter: str, token: str, limit: int) -> Page:
        """Return up to `limit` names that begin with `prefix`, after the page that gave `token`."""

    async def delete(self, name: str) -> None:
        """Remove an object; absent is fine."""

    def session(self) -> object:
        """Return what stands for the credentials now in use."""

    def renew(self, session: object) -> None:
        """Let the next request read the credentials again from where they come from, unless that happened since
        `session`."""

    async def server_time(self) -> float | None:
        """Return the service's clock in seconds since 1970, to the second, or None when it does not tell."""

    async def bucket_facts(self) -> BucketFacts:
        """Return what the bucket's settings say, as far as these credentials may ask."""

    def judge(self, error: Exception) -> Trouble:
        """Tell what an error of any of these means."""


class CloudStore:
    """Objects of one run below a folder of a bucket. Every request is a request: nothing is cached."""

    def __init__(self, address: Address, run: str, driver: Driver, limits: Limits = LIMITS) -> None:
        folder = f"{address.folder}/{run}" if address.folder else run
        self.url = f"{address.scheme}://{address.bucket}/{folder}"
        self._prefix = folder + "/"
        self._driver = driver
        self._limits = limits
        self.page_size = 1000
        """Names per request of a listing; 1000 is the most that S3 and Google give."""

    def get(self, key: str) -> bytes | None:
        check_key(key)
        return self._do("read", key, lambda: self._driver.get(self._prefix + key))

    def create(self, key: str, data: bytes) -> None:
        check_body(key, data)
        self._do("create", key, lambda: self._driver.put(self._prefix + key, data, new=True), len(data))

    def put(self, key: str, data: bytes) -> None:
        check_body(key, data)
        self._do("write", key, lambda: self._driver.put(self._prefix + key, data, new=False), len(data))

    def list(self, prefix: str) -> Names:
        check_prefix(prefix)
        return sorted(key for key in self._own(self._names(prefix)) if is_key(key))

    def list_folders(self, prefix: str) -> Names:
        check_prefix(prefix)
        found = [name[:-1] for name in self._own(self._pages(prefix, "/", lambda page: page.folders))]
        return sorted(key.rpartition("/")[2] for key in found if is_key(key) and self._has_keys(key))

    def delete(self, key: str) -> None:
        check_key(key)
        self._do("delete", key, lambda: self._driver.delete(self._prefix + key))

    def delete_tree(self, prefix: str) -> int:
        check_prefix(prefix)
        names = self._names(prefix)
        self._wait(self._delete_all(names))
        # A folder marker that a service keeps for itself is no object of ours.
        return sum(not name.endswith("/") for name in names)

    def server_time(self) -> float | None:
        """Return the service's clock in seconds since 1970, to the second, or None when it does not tell."""
        return self._do("ask the time", "of it", self._driver.server_time)

    def bucket_facts(self) -> BucketFacts:
        """Return what the bucket's settings say, as far as these credentials may ask."""
        return self._do("ask about", "the bucket", self._driver.bucket_facts)

    # ---- listings -----------------------------------------------------------------------------------------------

    def _own(self, names: Names) -> Names:
        return [name[len(self._prefix) :] for name in names if name.startswith(self._prefix)]

    def _names(self, prefix: str) -> Names:
        return self._pages(prefix, "", lambda page: page.names)

    def _pages(self, prefix: str, delimiter: str, take: Callable[[Page], Names]) -> Names:
        """Return all of a listing, page by page; one page that fails fails all of it."""
        found: Names = []
        token = ""
        while True:
            page = self._page(prefix, delimiter, token)
            found += take(page)
            token = page.token
            if not token:
                return found

    def _page(self, prefix: str, delimiter: str, token: str, limit: int = 0) -> Page:
        what, limit = prefix or "everything", limit or self.page_size
        return self._do("list", what, lambda: self._driver.page(self._prefix + prefix, delimiter, token, limit))

    def _has_keys(self, folder: str) -> bool:
        if not self._driver.phantom_folders:
            return True
        return any(not name.endswith("/") for name in self._page(f"{folder}/", "", "", limit=2).names)

    async def _delete_all(self, names: Names) -> None:
        slots = asyncio.Semaphore(DELETES_AT_ONCE)

        async def delete(name: str) -> None:
            async with slots:
                await self._try("delete", name[len(self._prefix) :], lambda: self._driver.delete(name), 0)

        # All are seen to their end: none may go on behind the back of a caller that was told of a failure.
        results = await asyncio.gather(*(delete(name) for name in names), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    # ---- tries --------------------------------------------------------------------------------------------------

    def _do(self, verb: str, key: str, request: Callable[[], Awaitable[T]], size: int = 0) -> T:
        return self._wait(self._try(verb, key, request, size))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Do `work` in the storage loop, which all stores of a process share, and wait for it in this thread."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, get_loop())
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C in the waiting thread must not leave a write that goes on
            raise

    async def _try(self, verb: str, key: str, request: Callable[[], Awaitable[T]], size: int) -> T:
        """Make a request until it succeeds or there is no point; `size`: bytes that it sends."""
        started = time.monotonic()
        pause = FIRST_PAUSE
        renewed = False
        while True:
            session = self._driver.session()
            try:
                # Downloads are watched byte by byte (`read_all`), since nobody knows their size before.
                limit = 2 * self._limits.stall + size / self._limits.slowest if size else None
                return await asyncio.wait_for(request(), limit)
            except Exception as error:
                trouble = self._judge(error)
                problem = error
            if trouble.kind == "taken":
                raise AlreadyExists(f"{key} exists in {self.url}") from problem
            if trouble.kind == "expired" and not renewed:
                renewed = True
                self._driver.renew(session)
                continue
            if trouble.kind != "again" or time.monotonic() - started + pause > self._limits.patience:
                raise self._unavailable(verb, key, trouble, time.monotonic() - started) from problem
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(LONGEST_PAUSE, 2 * pause)

    def _judge(self, error: Exception) -> Trouble:
        if isinstance(error, asyncio.TimeoutError):  # before Python 3.11 it is no TimeoutError
            return NO_ANSWER
        return self._driver.judge(error)

    def _unavailable(self, verb: str, key: str, trouble: Trouble, seconds: float) -> StoreUnavailable:
        tried = f", tried for {seconds:.0f} s" if trouble.kind == "again" else ""
        remedy = f": {trouble.remedy}" if trouble.remedy else ""
        return StoreUnavailable(f"{self.url}: cannot {verb} {key} ({trouble.words}{tried}){remedy}")


async def read_all(chunks: AsyncIterator[bytes], limits: Limits) -> bytes:
    """Return a whole download; raise `asyncio.TimeoutError` when it is too slow."""
    started = time.monotonic()
    parts: list[bytes] = []
    size = 0
    async for chunk in chunks:
        parts.append(chunk)
        size += len(chunk)
        if time.monotonic() - started > limits.stall + size / limits.slowest:
            raise asyncio.TimeoutError
    return parts[0] if len(parts) == 1 else b"".join(parts)


def date_seconds(header: str) -> float | None:
    """Return an HTTP date in seconds since 1970, None when it is none."""
    try:
        return parsedate_to_datetime(header).timestamp()
    except ValueError:
        return None


def network_trouble(error: Exception) -> Trouble | None:
    """Tell what an error below HTTP means, whoever raised it; None when it is none."""
    import ssl

    import aiohttp

    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    if any(isinstance(link, ssl.SSLCertVerificationError) for link in chain):
        return Trouble(
            "permanent", f"TLS failed: {chain[-1]}", "check the endpoint, this machine's clock and its certificates"
        )
    if any(isinstance(link, asyncio.TimeoutError | TimeoutError) for link in chain):
        return NO_ANSWER
    if any(isinstance(link, aiohttp.ClientConnectorDNSError) for link in chain):
        return Trouble("again", "its host has no address", "check the endpoint's spelling, and the network")
    if any(isinstance(link, aiohttp.ClientError | OSError | asyncio.TimeoutError) for link in chain):
        last = next(link for link in reversed(chain) if isinstance(link, aiohttp.ClientError | OSError | TimeoutError))
        words = str(last) or type(last).__name__
        return Trouble("again", f"the connection failed: {words}", "check the endpoint and the network")
    return None
