"""The demo with its blackboard in a bucket of a real server on this machine: `python -m tests.support.demo s3`.

Writes a spec beside the demo's own that differs in where the store is, starts the server, runs the demo on it, and
stops the server, which takes the bucket with it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support import buckets, servers

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "shakespeare"
SERVERS = {
    "s3": (servers.seaweedfs, buckets.make_s3_bucket, buckets.s3_url),
    "gcs": (servers.fake_gcs, buckets.make_gs_bucket, buckets.gs_url),
}


def spec_in_bucket(text: str, url: str) -> str:
    """Return the demo's spec with its store at `url`, and heartbeats as rare as object stores want them."""
    place, _, options = url.partition("?")
    table = "".join(f'{name} = "{value}"\n' for name, value in (option.split("=", 1) for option in options.split("&")))
    moved = re.sub(r"(?m)^store = .*$", f'store = "{place}"', text)
    slower = re.sub(r"(?m)^heartbeat_every = .*$", "heartbeat_every = 5.0", moved)
    return slower.replace("[model]", f"[store]\n{table}\n[model]", 1)


def main(kind: str) -> int:
    start, make_bucket, url = SERVERS[kind]
    with start() as server:
        make_bucket(server)
        text = spec_in_bucket((EXAMPLE / "run.toml").read_text(), url(server.url, "demo"))
        spec = EXAMPLE / f"run-{kind}.toml"
        spec.write_text(text)
        print(
            f"the blackboard is in a bucket of a server on this machine, {server.url}; the spec is {spec}", flush=True
        )
        # Ctrl-C reaches the demo itself, too; it takes the run down, which needs the server.
        demo = subprocess.Popen([sys.executable, str(EXAMPLE / "demo.py"), spec.name], env=dict(os.environ))
        while True:
            try:
                return demo.wait()
            except KeyboardInterrupt:
                continue


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
