"""Whole runs with their blackboard in a bucket of a real server: outages, secrets, what a person is told."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco_cli.exit_codes import ExitCode
from tests.e2e.live import LiveRun
from tests.support import buckets, servers
from tests.support.proxy import Faults, Proxy

pytestmark = pytest.mark.e2e

OUTAGE = 20.0
"""Seconds for which the server is dead."""
NEVER_REACHED = 50_000_000

KINDS = {
    "s3": (servers.seaweedfs, buckets.make_s3_bucket, buckets.s3_url),
    "gs": (servers.fake_gcs, buckets.make_gs_bucket, buckets.gs_url),
}


def steps(run: LiveRun) -> dict[str, int]:
    """Return how many inner steps each island has made, as it tells its agent: without the store."""
    found = {}
    for path in Path(os.environ["DILOCO_HOME"]).glob("runs/*/*/learner-status.json"):
        found[path.parent.name] = int(json.loads(path.read_text())["step"])
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_dies_in_mid_run_stops_no_island_and_loses_nothing(
    kind: str, live: Callable[..., LiveRun]
) -> None:
    start, make_bucket, url = KINDS[kind]
    with start() as server:
        make_bucket(server)
        run = live(tokens=NEVER_REACHED, store=url(server.url, "outage"))
        supervisor = run.train()
        run.wait_for_commits(5)
        before, began = run.log_bytes(), time.monotonic()
        server.kill()
        made = steps(run)
        assert sorted(made) == ["a", "b", "c"]
        run.wait(lambda: time.monotonic() - began > OUTAGE, OUTAGE + 5.0, "the outage")
        # Each makes several steps a second; nobody has waited for the store.
        assert all(now > made[island] + 20 for island, now in steps(run).items()), (made, steps(run))
        server.start()
        run.wait(lambda: run.head() > len(before), 90.0, "a commit after the outage")
        run.wait_for_commits(12)
        assert supervisor.poll() is None, run.output()
        run.end()
        assert run.log_bytes()[: len(before)] == before, "what was acknowledged before the kill is there"
        assert run.log()[-1].phase == "final"
        run.check_books()
        for beat in run.heartbeats():
            assert beat.incarnation == 1, "an outage restarts nobody"
            assert beat.learner.longest_gap < 1.0 and beat.learner.waited_seconds < 2.0, beat.learner
        if kind == "s3":
            check_no_secret(run)


def check_no_secret(run: LiveRun) -> None:
    """Assert that the key is nowhere but in the environment."""
    secret, board = servers.SECRET.encode(), run.board()
    keys = board.store.list("")
    assert len(keys) > 50
    places = {key: board.store.get(key) or b"" for key in keys}
    places["status"] = json.dumps(run.status()).encode()
    places["check"] = run.diloco("check", "run.toml", "--json").stdout.encode()
    for folder in (run.folder, Path(os.environ["DILOCO_HOME"])):
        places |= {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert any(path.endswith("island.log") for path in places) and any("train-" in path for path in places)
    assert [place for place, content in places.items() if secret in content] == []
    for process in run.processes():
        assert secret not in " ".join(process.cmdline()).encode()


def check_refusal(run: LiveRun, *says: str, limit: float = 20.0) -> None:
    """Assert that commands end in time with one sentence and the documented exit code."""
    for command in ("check", "status", "up"):
        began = time.monotonic()
        done = run.diloco(command, "run.toml", *(["--yes"] if command == "up" else []))
        assert done.returncode == ExitCode.STORE_UNAVAILABLE, done.stdout + done.stderr
        assert time.monotonic() - began < limit
        (sentence,) = [line for line in done.stderr.splitlines() if line]
        assert all(part in sentence for part in says), sentence
        assert "Traceback" not in done.stderr and servers.SECRET not in done.stderr


def test_what_people_are_told_when_a_bucket_refuses(
    live: Callable[..., LiveRun], s3_server: servers.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Proxy(s3_server.port, "s3") as proxy:
        run = live(store=buckets.s3_url(proxy.url, "refusals"))
        for status, code, words in (
            (400, "ExpiredToken", "the credentials have expired"),
            (403, "AccessDenied", "access denied"),
            (404, "NoSuchBucket", "there is no such bucket"),
            (403, "RequestTimeTooSkewed", "this machine's clock is wrong"),
        ):
            proxy.answer_next(status, code, times=1000)
            check_refusal(run, "s3://diloco-tests/refusals/live: cannot ", words)
            proxy.forget()
        monkeypatch.setenv(f"{buckets.ENV}_SECRET_ACCESS_KEY", "another-secret")
        check_refusal(run, "it does not know these credentials", "correct the keys that [store] credentials names")
        monkeypatch.delenv(f"{buckets.ENV}_SECRET_ACCESS_KEY")
        check_refusal(run, f"{buckets.ENV}_SECRET_ACCESS_KEY is not set")


def test_a_dead_endpoint_is_given_up_in_time(live: Callable[..., LiveRun]) -> None:
    run = live(store=buckets.gs_url(f"http://127.0.0.1:{servers.free_port()}", "nobody"))
    began = time.monotonic()
    done = run.diloco("check", "run.toml")
    assert done.returncode == ExitCode.STORE_UNAVAILABLE
    assert "check the endpoint and the network" in done.stderr and time.monotonic() - began < 50.0


def test_a_clock_that_is_off_is_a_warning(live: Callable[..., LiveRun], gs_server: servers.Server) -> None:
    with Proxy(gs_server.port, "gcs") as proxy:
        proxy.faults = Faults(date="Sat, 01 Jan 2000 00:00:00 GMT")
        done = live(store=buckets.gs_url(proxy.url, "clock")).diloco("check", "run.toml")
        assert done.returncode == 0, done.stderr
        assert "! this machine's clock is " in done.stdout and "ahead of the store's; set it" in done.stdout


def test_a_store_that_ignores_the_condition_is_refused(live: Callable[..., LiveRun], gs_server: servers.Server) -> None:
    with Proxy(gs_server.port, "gcs") as proxy:
        proxy.faults = Faults(rewrite=("&ifGenerationMatch=0", ""))
        run = live(store=buckets.gs_url(proxy.url, "careless"))
        for command in ("check", "up", "train"):
            done = run.diloco(command, "run.toml", *([] if command == "check" else ["--yes"]))
            assert done.returncode == ExitCode.STORE_UNAVAILABLE, done.stdout
            assert "an existing object was created again; this store ignores the condition" in done.stderr
        assert proxy.seen["rewritten"] >= 2 and run.processes() == []
