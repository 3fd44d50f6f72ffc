"""Stores that fail the way networks fail, around a store that works."""

from __future__ import annotations

from diloco_runtime.errors import StoreUnavailable
from diloco_runtime.store import AlreadyExists, Names, ObjectStore


class Wrapped:
    """Passes everything on; a fault is a subclass that overrides one verb."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner
        self.url = inner.url

    def get(self, key: str) -> bytes | None:
        return self.inner.get(key)

    def create(self, key: str, data: bytes) -> None:
        self.inner.create(key, data)

    def put(self, key: str, data: bytes) -> None:
        self.inner.put(key, data)

    def list(self, prefix: str) -> Names:
        return self.inner.list(prefix)

    def list_folders(self, prefix: str) -> Names:
        return self.inner.list_folders(prefix)

    def delete(self, key: str) -> None:
        self.inner.delete(key)

    def delete_tree(self, prefix: str) -> int:
        return self.inner.delete_tree(prefix)


class LostAnswer(Wrapped):
    """The first create takes effect, but its answer is lost."""

    lost = False

    def create(self, key: str, data: bytes) -> None:
        self.inner.create(key, data)
        if not self.lost:
            self.lost = True
            raise StoreUnavailable(f"no answer for {key}")


class RetryingClient(Wrapped):
    """The client repeats a create by itself after a lost answer, and so loses to its own first write."""

    def create(self, key: str, data: bytes) -> None:
        self.inner.create(key, data)
        raise AlreadyExists(key)


class LateWrite(Wrapped):
    """The first create is reported as failed and takes effect only when the next one is sent."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.held: tuple[str, bytes] | None = None
        self.bodies: list[bytes] = []

    def create(self, key: str, data: bytes) -> None:
        self.bodies.append(data)
        if self.held is None:
            self.held = (key, data)
            raise StoreUnavailable(f"no answer for {key}")
        self.inner.create(*self.held)
        self.inner.create(key, data)


class Unwritable(Wrapped):
    """Creates fail without effect as long as `broken`; reads work."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.broken = True
        self.bodies: list[bytes] = []

    def create(self, key: str, data: bytes) -> None:
        self.bodies.append(data)
        if self.broken:
            raise StoreUnavailable(f"no space for {key}")
        self.inner.create(key, data)
