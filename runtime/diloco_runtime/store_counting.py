"""A store that counts what another one is asked: requests by verb, bytes up, bytes down."""

from __future__ import annotations

import threading

from diloco_runtime.store import Names, ObjectStore


class CountingStore:
    """Passes everything on to `inner`. A request counts when sent, answered or not; so do the bytes of a write."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner
        self.url = inner.url
        self.requests: dict[str, int] = {}
        """Verb -> number of requests so far."""
        self.bytes_up = 0
        self.bytes_down = 0
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes | None:
        self._count("get")
        data = self.inner.get(key)
        if data is not None:
            with self._lock:
                self.bytes_down += len(data)
        return data

    def create(self, key: str, data: bytes) -> None:
        self._count("create", len(data))
        self.inner.create(key, data)

    def put(self, key: str, data: bytes) -> None:
        self._count("put", len(data))
        self.inner.put(key, data)

    def list(self, prefix: str) -> Names:
        self._count("list")
        return self.inner.list(prefix)

    def list_folders(self, prefix: str) -> Names:
        self._count("list_folders")
        return self.inner.list_folders(prefix)

    def delete(self, key: str) -> None:
        self._count("delete")
        self.inner.delete(key)

    def delete_tree(self, prefix: str) -> int:
        self._count("delete_tree")
        return self.inner.delete_tree(prefix)

    def _count(self, verb: str, bytes_up: int = 0) -> None:
        with self._lock:
            self.requests[verb] = self.requests.get(verb, 0) + 1
            self.bytes_up += bytes_up
