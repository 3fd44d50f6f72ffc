"""The byte-level seam to object storage: a few verbs, one adapter per kind of store.

Only the adapters (`store_*.py`) know a storage library or the file system. Every failure is a `StoreUnavailable` that
names store, key and remedy; absence is `None`, never an error; a listing that failed is an error, never an empty list.
Empty bodies are refused everywhere: storage libraries turn them into other calls that may truncate a live object.
"""

from __future__ import annotations

import re
from typing import Protocol

from diloco_runtime.errors import ConfigError
from diloco_runtime.keys import is_run_name

Names = list[str]
"""What listings return; an alias because `list` is a verb inside the stores."""

_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
_MEMORY_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]*")
MAX_KEY = 512
"""Longest key in characters: half of what S3 and GCS allow, which leaves room for the folder in front of it."""


class AlreadyExists(Exception):
    """Raised by `create` when the key seems taken. Seems: a client that retries by itself can lose to its own first
    write, so `Blackboard.create` reads back before it believes this."""


class ObjectStore(Protocol):
    """What the blackboard needs of a store. Keys are relative to the run's folder. Safe to use from many threads."""

    url: str
    """The run's folder, for messages."""

    def get(self, key: str) -> bytes | None:
        """Return the whole object, or None when there is none."""

    def create(self, key: str, data: bytes) -> None:
        """Write `data` if `key` is absent, whole or not at all; raise `AlreadyExists` otherwise."""

    def put(self, key: str, data: bytes) -> None:
        """Write `data` whole or not at all, replacing what was there (payloads with unique names, heartbeats)."""

    def list(self, prefix: str) -> Names:
        """Return every key that starts with `prefix` (which ends in a slash, or is empty: all), sorted."""

    def list_folders(self, prefix: str) -> Names:
        """Return the names directly below `prefix` that have keys below them, sorted."""

    def delete(self, key: str) -> None:
        """Remove `key`; absent is fine."""

    def delete_tree(self, prefix: str) -> int:
        """Remove every key below `prefix` (which ends in a slash) and whatever the store keeps for it besides objects
        (folders, half-written files); return how many keys there were. Absent is fine."""


def is_key(key: str) -> bool:
    """Tell whether `key` can name an object: relative, no empty, hidden or `..` segment, plain characters only."""
    return len(key) <= MAX_KEY and _KEY.fullmatch(key) is not None


def check_key(key: str) -> None:
    """Raise `ValueError` unless `key` can name an object."""
    if not is_key(key):
        raise ValueError(f"{key!r} cannot be the key of an object")


def check_prefix(prefix: str) -> None:
    """Raise `ValueError` unless `prefix` is empty or a key followed by a slash."""
    if prefix and not (prefix.endswith("/") and is_key(prefix[:-1])):
        raise ValueError(f"{prefix!r} cannot be the prefix of keys; it must end in a slash")


def check_body(key: str, data: bytes) -> None:
    """Raise `ValueError` for a write under an impossible key or without content."""
    check_key(key)
    if not data:
        raise ValueError(f"an empty object cannot be written ({key})")


def without_options(url: str) -> str:
    """Return a store's URL as people are shown it: a bucket's without the options that say how to reach it."""
    return url.partition("?")[0] if url.startswith(("s3://", "gs://")) else url


def open_store(url: str, run: str) -> ObjectStore:
    """Return the store that holds run `run` below `url`; raise `ConfigError` when `url` names no store known here."""
    if not is_run_name(run):
        raise ConfigError(
            f'"{run}" cannot name a run; use 1 to 40 lower-case letters, digits and dashes, beginning with a letter '
            "and not ending with a dash"
        )
    kind, separator, place = url.partition("://")
    place = place.rstrip("/")
    if separator and kind == "file":
        if not place.startswith("/"):
            raise ConfigError(f'store = "{url}": the folder must be absolute, as in file:///home/me/diloco')
        from diloco_runtime.store_local import LocalStore

        return LocalStore(f"{place}/{run}")
    if separator and kind == "memory":
        if _MEMORY_NAME.fullmatch(place) is None:
            raise ConfigError(f'store = "{url}": give the memory a plain name, as in memory://trial')
        from diloco_runtime.store_memory import MemoryStore

        return MemoryStore(f"{place}/{run}")
    if separator and kind in ("s3", "gs"):
        return _open_bucket(url, run)
    raise ConfigError(
        f'store = "{url}" is not supported; a run needs s3://bucket/folder, gs://bucket/folder or '
        "file:///absolute/folder. memory://name lives in one process: for tests and benches, not for a spec"
    )


def _open_bucket(url: str, run: str) -> ObjectStore:
    from diloco_runtime.store_address import parse_address
    from diloco_runtime.store_cloud import CloudStore

    address = parse_address(url)
    if address.scheme == "s3":
        from diloco_runtime.store_s3 import S3Driver

        return CloudStore(address, run, S3Driver(address))
    from diloco_runtime.store_gcs import GcsDriver

    return CloudStore(address, run, GcsDriver(address))
