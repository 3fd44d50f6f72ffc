"""`file://`: the blackboard in a folder of this machine (or of a file system that has hard links and POSIX renames).

Whole or not at all: bytes go to a temporary file first, are flushed to the disk, and get their name in one step (`link`
fails when the name is taken, `rename` replaces). fsspec's own local files are not used: their exclusive create lets
several racing writers win, and their writes are visible half done.

Temporary files live in a hidden folder beside the top of the key (`<run id>/.tmp/`), so that no listing sees them, a
purge takes them along, and what killed writers left is found without a search.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress

from diloco_runtime.clock import SystemNonces
from diloco_runtime.errors import StoreUnavailable
from diloco_runtime.store import AlreadyExists, Names, check_body, check_key, check_prefix, is_key

SCRATCH = ".tmp"
STALE_SECONDS = 3600.0
"""A temporary file untouched for this long belongs to a killed writer. A writer that was only frozen finds its file
gone, and starts its write anew."""

WRITE_ATTEMPTS = 100
"""Tries of one write whose folders vanish under it. Each takes another removal at just that moment, so that only a
process that removes folders without pause can use them up."""

_NO_LINKS = "this file system has no hard links; keep the blackboard on a local disk"
_FULL = "free some space there"
_FORBIDDEN = "let this user write there"
_REMEDIES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EACCES: _FORBIDDEN,
    errno.EPERM: f"{_FORBIDDEN}, or, if it may, {_NO_LINKS}",
    errno.EROFS: "mount it writable or choose another folder",
    errno.EIO: "check the disk",
    errno.ESTALE: "check the mount",
    errno.ENOTDIR: "a file stands where the store needs a folder; move it away",
    errno.EISDIR: "a folder stands where the store needs a file; move it away",
    errno.ENOTSUP: _NO_LINKS,
    errno.ENOSYS: _NO_LINKS,
    errno.EXDEV: "keep the whole folder on one file system",
}


class LocalStore:
    """Objects of one run as files below an absolute folder, shared by all processes of the machine."""

    def __init__(self, folder: str) -> None:
        self.url = f"file://{folder}"
        self._root = folder
        self._nonces = SystemNonces()
        self._swept: set[str] = set()

    def get(self, key: str) -> bytes | None:
        check_key(key)
        try:
            with open(self._path(key), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unavailable("read", key, error) from error

    def create(self, key: str, data: bytes) -> None:
        check_body(key, data)
        try:
            self._write(key, data, os.link)
        except FileExistsError as error:
            raise AlreadyExists(f"{key} exists in {self.url}") from error
        except OSError as error:
            raise self._unavailable("create", key, error) from error

    def put(self, key: str, data: bytes) -> None:
        check_body(key, data)
        try:
            self._write(key, data, os.replace)
        except OSError as error:
            raise self._unavailable("write", key, error) from error

    def list(self, prefix: str) -> Names:
        check_prefix(prefix)
        try:
            return sorted(self._keys_below(prefix))
        except OSError as error:
            raise self._unavailable("list", prefix or "everything", error) from error

    def list_folders(self, prefix: str) -> Names:
        check_prefix(prefix)
        try:
            folders = [entry for entry in _scan(self._path(prefix)) if entry.is_dir(follow_symlinks=False)]
            names = [entry.name for entry in folders if is_key(entry.name)]
            # An object store knows only keys, so a folder without any below it is none.
            return sorted(name for name in names if any(True for _ in self._keys_below(f"{prefix}{name}/")))
        except OSError as error:
            raise self._unavailable("list", prefix or "everything", error) from error

    def delete(self, key: str) -> None:
        check_key(key)
        path = self._path(key)
        try:
            os.unlink(path)
            _sync_folder(os.path.dirname(path))
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._unavailable("delete", key, error) from error
        self._remove_empty_folders(os.path.dirname(path))

    def delete_tree(self, prefix: str) -> int:
        check_prefix(prefix)
        top = self._path(prefix).rstrip("/")
        try:
            deleted = _remove_tree(top, visible=True)
        except OSError as error:
            raise self._unavailable("delete", prefix or "everything", error) from error
        self._remove_empty_folders(top)
        return deleted

    # ---- writing ------------------------------------------------------------------------------------------------

    def _write(self, key: str, data: bytes, publish: Callable[[str, str], None]) -> None:
        """Write `data` to a temporary file and give it its name by `publish` (temporary path, final path)."""
        target = self._path(key)
        top, slash, _ = key.partition("/")
        scratch = os.path.join(self._root, top if slash else "", SCRATCH)
        for _ in range(WRITE_ATTEMPTS):
            try:
                return self._write_once(target, scratch, data, publish)
            except FileNotFoundError:
                # The first write here, or a purge or a delete removed an empty folder under this one.
                _make_folder(scratch)
                _make_folder(os.path.dirname(target))
        raise OSError(errno.ESTALE, "its folders vanish again and again")

    def _write_once(self, target: str, scratch: str, data: bytes, publish: Callable[[str, str], None]) -> None:
        temporary = os.path.join(scratch, self._nonces.new())
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                now = os.fstat(file.fileno()).st_mtime
            self._sweep(scratch, now)
            publish(temporary, target)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
        # Without this a power cut may take back the name after others have built on it.
        _sync_folder(os.path.dirname(target))

    def _sweep(self, scratch: str, now: float) -> None:
        """Remove what killed writers left in `scratch`, once per store object. `now`: time on the file system's own
        clock, which stamped those files too."""
        if scratch in self._swept:
            return
        self._swept.add(scratch)
        # A sweep that fails costs space, nothing else: the write it stands in goes on.
        with suppress(OSError):
            for entry in _scan(scratch):
                if now - entry.stat(follow_symlinks=False).st_mtime > STALE_SECONDS:
                    with suppress(FileNotFoundError):
                        os.unlink(entry.path)

    # ---- folders ------------------------------------------------------------------------------------------------

    def _path(self, key: str) -> str:
        return os.path.join(self._root, key)

    def _keys_below(self, prefix: str) -> Iterator[str]:
        """Yield the keys below `prefix` in no order; hidden names and names that cannot be keys are none of ours."""
        for entry in _scan(self._path(prefix)):
            key = prefix + entry.name
            if not is_key(key):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from self._keys_below(key + "/")
            else:
                yield key

    def _remove_empty_folders(self, folder: str) -> None:
        """Remove `folder` and the folders above it up to the run's own, as far as they are empty (but for scratch)."""
        # Whoever is about to write there finds the folder missing and makes it again.
        with suppress(OSError):
            while folder == self._root or folder.startswith(self._root + "/"):
                with suppress(OSError):
                    os.rmdir(os.path.join(folder, SCRATCH))
                with suppress(FileNotFoundError):
                    os.rmdir(folder)
                folder = os.path.dirname(folder)

    def _unavailable(self, verb: str, key: str, error: OSError) -> StoreUnavailable:
        remedy = _REMEDIES.get(error.errno or 0, "check that folder")
        return StoreUnavailable(f"{self.url}: cannot {verb} {key} ({error.strerror or error}): {remedy}")


def _scan(folder: str) -> list[os.DirEntry[str]]:
    """Return the entries of `folder`; none when it does not exist. Raises `OSError` when they cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def _make_folder(folder: str) -> None:
    """Create `folder` and what is missing above it, each name flushed to the disk."""
    try:
        os.mkdir(folder)
    except FileNotFoundError:
        _make_folder(os.path.dirname(folder))
        return _make_folder(folder)
    except FileExistsError:
        # One look only: between two, a purge may remove the folder and another writer make it again.
        try:
            mode = os.lstat(folder).st_mode
        except FileNotFoundError:
            return
        # A link is nobody's to remove here, so that its target can be looked at apart.
        if not (stat.S_ISDIR(mode) or (stat.S_ISLNK(mode) and os.path.isdir(folder))):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder) from None
        return
    _sync_folder(os.path.dirname(folder))


def _sync_folder(folder: str) -> None:
    """Flush the names in `folder` to the disk."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return  # removed since: no name is left to keep
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot flush a folder; they keep names safe by themselves.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _remove_tree(folder: str, visible: bool) -> int:
    """Remove `folder` and everything below it; return how many objects that were."""
    removed = 0
    for entry in _scan(folder):
        is_ours = visible and is_key(entry.name)
        if entry.is_dir(follow_symlinks=False):
            removed += _remove_tree(entry.path, is_ours)
            continue
        with suppress(FileNotFoundError):
            os.unlink(entry.path)
            removed += is_ours
    try:
        os.rmdir(folder)
    except OSError as error:
        # Filled again by a late writer, or removed by another purge: both are fine.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise
    return removed
