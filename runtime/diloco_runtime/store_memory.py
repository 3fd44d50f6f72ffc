"""`memory://`: the blackboard in the memory of one process, on fsspec's memory file system.

For trials and tests inside one process: another process that opens the same URL sees another, empty store.
"""

from __future__ import annotations

import threading

import fsspec

from diloco_runtime.store import AlreadyExists, Names, check_body, check_key, check_prefix

_LOCK = threading.RLock()
"""Around every operation of every `MemoryStore`: fsspec's memory is one per process and not thread-safe (its exclusive
create looks first and writes then)."""


class MemoryStore:
    """Objects of one run below `memory://<folder>`. Stores with the same folder share their objects."""

    def __init__(self, folder: str) -> None:
        self.url = f"memory://{folder}"
        self._root = f"/{folder}/"
        self._fs = fsspec.filesystem("memory")

    def get(self, key: str) -> bytes | None:
        check_key(key)
        with _LOCK:
            if not self._fs.isfile(self._root + key):
                return None
            return bytes(self._fs.cat_file(self._root + key))

    def create(self, key: str, data: bytes) -> None:
        check_body(key, data)
        with _LOCK:
            if self._fs.isfile(self._root + key):
                raise AlreadyExists(f"{key} exists in {self.url}")
            self._fs.pipe_file(self._root + key, data)

    def put(self, key: str, data: bytes) -> None:
        check_body(key, data)
        with _LOCK:
            self._fs.pipe_file(self._root + key, data)

    def list(self, prefix: str) -> Names:
        check_prefix(prefix)
        with _LOCK:
            paths = self._fs.find(self._root + prefix)
        # fsspec answers with the object itself when the prefix without its slash is one.
        return sorted(path[len(self._root) :] for path in paths if path.startswith(self._root + prefix))

    def list_folders(self, prefix: str) -> Names:
        below = [key[len(prefix) :] for key in self.list(prefix)]
        return sorted({name.partition("/")[0] for name in below if "/" in name})

    def delete(self, key: str) -> None:
        check_key(key)
        with _LOCK:
            if self._fs.isfile(self._root + key):
                self._fs.rm_file(self._root + key)

    def delete_tree(self, prefix: str) -> int:
        with _LOCK:
            keys = self.list(prefix)
            for key in keys:
                self._fs.rm_file(self._root + key)
            return len(keys)
