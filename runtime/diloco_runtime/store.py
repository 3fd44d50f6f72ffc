"""The byte-level seam to object storage: seven verbs, one adapter per kind of store.

This is the only module that imports fsspec. Every failure is a `StoreUnavailable`; absence is `None`, never an error;
a listing that failed is an error, never an empty list.
"""

from __future__ import annotations

from typing import Protocol


class AlreadyExists(Exception):
    """Raised by `create` when the key seems taken. Seems: a client that retries by itself can lose to its own first
    write, so `Blackboard.create` reads back before it believes this."""


class ObjectStore(Protocol):
    """What the blackboard needs of a store. Keys are relative to the run's folder."""

    url: str

    def get(self, key: str) -> bytes | None: ...

    def create(self, key: str, data: bytes) -> None:
        """Write `data` if `key` is absent, whole or not at all; raise `AlreadyExists` otherwise."""

    def put(self, key: str, data: bytes) -> None:
        """Write `data` whole or not at all, replacing what was there (payloads with unique names, heartbeats)."""

    def list(self, prefix: str) -> list[str]:
        """Return every key that starts with `prefix` (which ends in a slash), sorted."""

    def list_folders(self, prefix: str) -> list[str]:
        """Return the names directly below `prefix` that have keys below them, sorted."""

    def delete(self, key: str) -> None:
        """Remove `key`; absent is fine."""
