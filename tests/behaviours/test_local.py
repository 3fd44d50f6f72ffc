"""What only a folder on a disk has: killed writers, temporary files, full and broken disks."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diloco_runtime.errors import StoreUnavailable
from diloco_runtime.store import ObjectStore, open_store
from diloco_runtime.store_local import STALE_SECONDS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of the run, which does not exist yet."""
    return tmp_path / "blackboard" / "trial"


@pytest.fixture
def local(folder: Path) -> ObjectStore:
    return open_store(f"file://{folder.parent}", "trial")


def wait_for(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)  # the interval of a poll with a deadline


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# ---- kill -9 --------------------------------------------------------------------------------------------------------


def check_whole(store: ObjectStore, key: str) -> None:
    """Bodies spell out their own length, so a part of one gives itself away."""
    data = store.get(key)
    assert data is not None and len(data) == int(data[:16]), f"{key} is not whole"


def test_nothing_partial_is_visible_after_kill_9(folder: Path, local: ObjectStore) -> None:
    chance = random.Random(4)
    leftovers = 0
    for life in range(12):
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'runtime'}"}
        command = [sys.executable, "-m", "tests.behaviours.racers", f"file://{folder.parent}", str(life), "200_000"]
        writer = subprocess.Popen(command, cwd=ROOT, env=environment)
        try:
            wait_for(lambda life=life: local.get(f"kill/{life}-1"))
            time.sleep(chance.uniform(0, 0.03))  # the moment of death is random on purpose
        finally:
            writer.kill()
            writer.wait()
        keys = local.list("")
        for key in keys:
            check_whole(local, key)
        leftovers = len(files_below(folder)) - len(keys)
    assert leftovers > 0, "no kill fell into a write: this test showed nothing"
    assert local.delete_tree("") == len(keys)
    assert not folder.exists()


# ---- temporary files ------------------------------------------------------------------------------------------------


def test_finished_writes_leave_no_temporary_file(folder: Path, local: ObjectStore) -> None:
    local.create("aa/x/1", b"x")
    local.put("aa/x/1", b"y")
    with pytest.raises(Exception, match="exists"):
        local.create("aa/x/1", b"z")
    local.create("run.json", b"x")
    assert files_below(folder) == ["aa/x/1", "run.json"]


def test_temporary_files_of_the_dead_are_hidden_and_swept_after_an_hour(folder: Path, local: ObjectStore) -> None:
    local.create("aa/x/1", b"x")
    scratch = folder / "aa" / ".tmp"
    now = time.time()
    for name, age in (("stale", STALE_SECONDS + 60), ("fresh", STALE_SECONDS - 60)):
        (scratch / name).write_bytes(b"half an obj")
        os.utime(scratch / name, (now - age, now - age))
    assert local.list("") == ["aa/x/1"]
    assert local.list_folders("aa/") == ["x"]

    open_store(f"file://{folder.parent}", "trial").put("aa/x/2", b"x")
    assert files_below(folder) == ["aa/.tmp/fresh", "aa/x/1", "aa/x/2"]


def test_foreign_files_are_not_listed(folder: Path, local: ObjectStore) -> None:
    local.create("aa/x", b"x")
    for name in (".DS_Store", "lost + found", ".nfs0001"):
        (folder / "aa" / name).write_bytes(b"x")
    assert local.list("") == ["aa/x"]


def test_deleting_the_last_object_removes_the_empty_folders(folder: Path, local: ObjectStore) -> None:
    local.create("aa/blobs/1/x", b"x")
    local.create("aa/blobs/2/x", b"x")
    local.delete("aa/blobs/1/x")
    assert sorted(os.listdir(folder / "aa" / "blobs")) == ["2"]
    local.delete("aa/blobs/2/x")
    assert not folder.exists()
    assert folder.parent.exists()


def test_a_write_survives_that_its_folders_are_removed_under_it(local: ObjectStore) -> None:
    stop = threading.Event()
    failures: list[BaseException] = []
    written: list[int] = []

    def write(writer: int) -> None:
        count = 0
        try:
            while not stop.is_set():
                count += 1
                local.create(f"aa/{writer}/deep/{count}", b"x")
                local.put(f"aa/{writer}/heartbeat", b"y")
        except BaseException as error:
            failures.append(error)
        written.append(count)

    writers = [threading.Thread(target=write, args=(writer,)) for writer in range(3)]
    for writer in writers:
        writer.start()
    removed = passes = 0
    deadline = time.monotonic() + 30
    while removed < 500 and not failures and time.monotonic() < deadline:
        if local.list("aa/"):  # a remover that never pauses would leave nobody the time to write anything
            removed += local.delete_tree("aa/")
            passes += 1
    stop.set()
    for writer in writers:
        writer.join()
    assert failures == []
    assert removed >= 500 and passes > 50, f"{passes} passes removed {removed} objects: this was no race"
    assert removed + local.delete_tree("aa/") <= 2 * sum(written)


# ---- a store that does not work -------------------------------------------------------------------------------------


def check_unavailable(store: ObjectStore, key: str, *says: str, verbs: str = "get create put list delete") -> None:
    calls: dict[str, Callable[[], object]] = {
        "get": lambda: store.get(key),
        "create": lambda: store.create(key, b"x" * 10_000),
        "put": lambda: store.put(key, b"x" * 10_000),
        "list": lambda: store.list(key + "/"),
        "list_folders": lambda: store.list_folders(key + "/"),
        "delete": lambda: store.delete(key),
    }
    for verb in verbs.split():
        with pytest.raises(StoreUnavailable) as caught:
            calls[verb]()
        message = str(caught.value)
        assert "\n" not in message
        for part in (store.url, key, *says):
            assert part in message, f"{verb}: {message}"


def test_a_file_in_the_place_of_the_folder(folder: Path, local: ObjectStore) -> None:
    folder.parent.mkdir()
    folder.write_bytes(b"not a folder")
    every_verb = "get create put list list_folders delete"
    check_unavailable(local, "aa/log/1", "Not a directory", "move it away", verbs=every_verb)
    folder.unlink()
    local.create("aa/log/1", b"x")
    assert local.list("") == ["aa/log/1"]


def test_a_file_in_the_place_of_the_whole_store(folder: Path, local: ObjectStore) -> None:
    folder.parent.write_bytes(b"not a folder")
    check_unavailable(local, "aa/log/1", "Not a directory", "move it away")


def test_a_folder_in_the_place_of_an_object(local: ObjectStore) -> None:
    local.create("aa/log/1/x", b"x")
    check_unavailable(local, "aa/log/1", "move it away", verbs="get put delete")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 256 KiB in memory."""
    mountpoint = tmp_path / "disk"
    mountpoint.mkdir()
    try:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mountpoint)], capture_output=True, text=True
        )
    except FileNotFoundError:
        pytest.skip("no mount command")
    if done.returncode:
        pytest.skip(f"needs the right to mount a file system: {done.stderr.strip()}")
    yield mountpoint
    subprocess.run(["umount", "--lazy", str(mountpoint)], check=True)


def test_a_full_disk_is_unavailable_and_recovers(small_disk: Path) -> None:
    store = open_store(f"file://{small_disk}", "trial")
    store.create("aa/log/1", b"before")
    ballast = small_disk / "ballast"
    with pytest.raises(OSError, match="No space"), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    check_unavailable(store, "aa/log/2", "No space left", "free some space", verbs="create put")
    assert store.get("aa/log/1") == b"before"
    assert store.get("aa/log/2") is None
    assert store.list("") == ["aa/log/1"]
    ballast.unlink()
    store.create("aa/log/2", b"x" * 10_000)
    assert files_below(small_disk) == ["trial/aa/log/1", "trial/aa/log/2"]


def test_a_read_only_disk_is_unavailable_for_writing(small_disk: Path) -> None:
    store = open_store(f"file://{small_disk}", "trial")
    store.create("aa/log/1", b"before")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    check_unavailable(store, "aa/log/2", "Read-only", "mount it writable", verbs="create put")
    check_unavailable(store, "aa/log/1", "Read-only", "mount it writable", verbs="delete")
    assert store.get("aa/log/1") == b"before"


NOBODY = 65534
"""A user without rights."""


@pytest.fixture
def own_folder() -> Iterator[Path]:
    """Return a folder of the user that the test runs as: never root, who may write anywhere."""
    was_root = os.geteuid() == 0
    # Not below `tmp_path`, which only the user who started the tests may enter.
    with tempfile.TemporaryDirectory() as place:
        if was_root:
            os.chown(place, NOBODY, -1)
            os.seteuid(NOBODY)
        try:
            yield Path(place)
        finally:
            if was_root:
                os.seteuid(0)


def test_a_forbidden_folder_is_unavailable(own_folder: Path) -> None:
    store = open_store(f"file://{own_folder}", "trial")
    store.create("aa/log/1", b"x")
    os.chmod(own_folder / "trial/aa/log", 0o500)
    check_unavailable(store, "aa/log/2", "Permission denied", "let this user write", verbs="create put")
    os.chmod(own_folder / "trial/aa/log", 0o700)
