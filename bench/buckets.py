"""Buckets: throughput beside a plain client, where an outer step spends its time, and whether its cost stays flat.

Real servers on loopback (SeaweedFS for S3, fake-gcs-server for Google's JSON API). Payloads are published and read as a
run does it, and the same bytes by a plain client, in turn, directly and over a link of limited speed. Then the cycle of
`cycle.py`, through a proxy that delays each answer by 0 and by 50 ms. Then 2,000 outer steps of a tiny model, whose
requests, listings, seconds and objects are counted by quarters (600 on fake-gcs-server, which walks through all its
objects for every listing).
"""

from __future__ import annotations

import http.client
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol
from urllib.parse import quote

import torch
from _results import Cell, Lines, parse_arguments, print_table, quartiles
from _workplace import ROOT, changed, demo_spec, workplace, write_text
from cycle import ONE_CYCLE, READ, Cycle, measure

sys.path.insert(0, str(ROOT))  # the servers are the tests'

from diloco_cli.spec import Spec
from diloco_runtime import payloads
from diloco_runtime.store import open_store
from tests.support import buckets, servers
from tests.support.proxy import Faults, Proxy

LATENCIES = (0.0, 0.05)
"""Seconds by which each answer is late."""
LINK = 50_000_000
"""Bytes per second, each way, of the link of limited speed."""
QUARTERS = 4
TINY = {"layers": 1, "heads": 1, "width": 8}


class Plain(Protocol):
    """A client that does nothing but move bytes, one request after another."""

    def put(self, key: str, data: bytes) -> object: ...

    def get(self, key: str) -> bytes: ...


class PlainS3:
    """The client of botocore."""

    def __init__(self, port: int) -> None:
        import botocore.config
        import botocore.session

        # As it is used by a run: signed, and without a second pass over the body for a checksum.
        config = botocore.config.Config(request_checksum_calculation="when_required")
        self._client: Any = botocore.session.get_session().create_client(
            "s3", endpoint_url=f"http://127.0.0.1:{port}", region_name="us-east-1", config=config,
            aws_access_key_id=servers.KEY, aws_secret_access_key=servers.SECRET,
        )  # fmt: skip

    def put(self, key: str, data: bytes) -> object:
        return self._client.put_object(Bucket=buckets.BUCKET, Key=key, Body=data)

    def get(self, key: str) -> bytes:
        found: bytes = self._client.get_object(Bucket=buckets.BUCKET, Key=key)["Body"].read()
        return found


class PlainGcs:
    """One connection of the standard library."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)

    def put(self, key: str, data: bytes) -> object:
        path = f"/upload/storage/v1/b/{buckets.BUCKET}/o?uploadType=media&name={quote(key, safe='')}"
        return self._ask("POST", path, data)

    def get(self, key: str) -> bytes:
        return self._ask("GET", f"/storage/v1/b/{buckets.BUCKET}/o/{quote(key, safe='')}?alt=media")

    def _ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        self._connection.request(method, path, body)
        answer = self._connection.getresponse()
        data = answer.read()
        if answer.status != 200:
            raise SystemExit(f"the plain client got {answer.status}")
        return data


@dataclass(frozen=True)
class Service:
    """A storage server and how it is used."""

    name: str
    server: servers.Server
    dialect: Literal["s3", "gcs"]
    url: Callable[[str, str], str]
    plain: Callable[[int], Plain]


@contextmanager
def s3() -> Iterator[Service]:
    """Run an S3 server."""
    with servers.seaweedfs() as server:
        buckets.make_s3_bucket(server)
        yield Service("s3", server, "s3", buckets.s3_url, PlainS3)


@contextmanager
def gs() -> Iterator[Service]:
    """Run a server of Google's JSON API."""
    with servers.fake_gcs() as server:
        buckets.make_gs_bucket(server)
        yield Service("gs", server, "gcs", buckets.gs_url, PlainGcs)


# ---- throughput -----------------------------------------------------------------------------------------------------


def seconds_of(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def throughput(service: Service, port: int, way: str, size: int, pairs: int, lines: Lines) -> list[list[Cell]]:
    """Return the table's rows: publish and adopt payloads of `size` bytes, and the plain client in turn."""
    store, client = open_store(service.url(f"http://127.0.0.1:{port}", "throughput"), "run"), service.plain(port)
    uploader = payloads.Uploader(store)
    seconds: dict[str, tuple[list[float], list[float]]] = {"publish": ([], []), "adopt": ([], [])}
    for pair in range(-1, pairs):  # the first one warms up
        data = secrets.token_bytes(size)
        ours, plain, found = f"ours-{pair}", f"plain-{pair}", {}

        def publish(ours: str = ours, data: bytes = data, found: dict[str, payloads.PayloadRef] = found) -> None:
            found["ref"] = uploader.put(ours, data)

        work: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "publish": (publish, lambda plain=plain, data=data: client.put(plain, data)),
            "adopt": (lambda found=found: payloads.read(store, found["ref"]), lambda plain=plain: client.get(plain)),
        }
        for what, both in work.items():
            taken = {which: seconds_of(both[which]) for which in (pair % 2, 1 - pair % 2)}
            if pair >= 0:
                for which in (0, 1):
                    seconds[what][which].append(taken[which])
        uploader.take_back(ours, size)
    rows: list[list[Cell]] = []
    for what, (ours_took, plain_took) in seconds.items():
        rates = [size / 1e6 / statistics.median(took) for took in (ours_took, plain_took)]
        low, ratio, high = quartiles([b / a for a, b in zip(ours_took, plain_took, strict=True)])
        name = f"{service.name}{way}: {what} {size / 2**20:g} MiB"
        rows.append([name, *rates, f"{ratio:.2f}", f"{low:.2f} to {high:.2f}"])
        lines.add("throughput", service=service.name, way=way.strip(), what=what, size=size, ours=rates[0],
                  plain=rates[1], ratio=ratio, pair_quartiles=[low, high])  # fmt: skip
    return rows


# ---- stages ---------------------------------------------------------------------------------------------------------


def stages(service: Service, spec: Spec, turns: int, lines: Lines) -> list[list[Cell]]:
    """Return the table's rows: the stages of an outer step at each latency."""
    found: list[Cycle] = []
    for latency in LATENCIES:
        with Proxy(service.server.port, service.dialect) as proxy:
            proxy.faults = Faults(latency=latency)
            folder = f"stages-{1000 * latency:.0f}"
            found.append(measure(replace(spec, store=service.url(proxy.url, folder)), turns))
    rows: list[list[Cell]] = []
    for stage in (*ONE_CYCLE, "sweep"):
        medians = [1000 * statistics.median(cycle.stages.seconds[stage]) for cycle in found]
        traffic = found[0].stages.traffic.get(stage)
        rows.append(
            [f"{service.name}: {stage}", *medians, int(statistics.median(t[2] for t in traffic)) if traffic else None]
        )
    # What others wait for: publishing lies before the last offer's arrival.
    ends, waits = (
        [sum(1000 * statistics.median(cycle.stages.seconds[stage]) for stage in part) for cycle in found]
        for part in (ONE_CYCLE, ONE_CYCLE[ONE_CYCLE.index(READ) :])
    )
    rows.append([f"{service.name}: one after the other, from snapshot to adoption", *ends, None])
    rows.append([f"{service.name}: from the last offer's arrival to adoption", *waits, None])
    lines.add("stages", service=service.name, latencies=LATENCIES, parameters=found[0].parameters,
              milliseconds={str(row[0]): row[1:3] for row in rows})  # fmt: skip
    return rows


# ---- 2,000 outer steps ----------------------------------------------------------------------------------------------


def flat(service: Service, spec: Spec, turns: int, lines: Lines) -> list[list[Cell]]:
    """Return the table's rows: what an outer step takes in each quarter of a run, and what is left in the bucket."""
    spec = replace(spec, store=service.url(service.server.url, "flat"))
    cycle = Cycle(spec)
    for member in cycle.members:
        member.step("start")
    direct = open_store(spec.store, spec.name)
    rows: list[list[Cell]] = []
    stores = [*(member.store for member in cycle.members), cycle.store]
    for quarter in range(QUARTERS):
        before = [dict(store.requests) for store in stores]
        took = []
        for _ in range(turns // QUARTERS):
            took.append(seconds_of(cycle.turn))
        count: dict[str, float] = {}
        for store, old in zip(stores, before, strict=True):
            for verb, number in store.requests.items():
                count[verb] = count.get(verb, 0.0) + (number - old.get(verb, 0)) / len(took)
        listed = sum(number for verb, number in count.items() if verb in ("list", "list_folders", "delete_tree"))
        keys = direct.list("")
        records = sum("/log/" in key or "/offers/" in key for key in keys)
        last = (quarter + 1) * (turns // QUARTERS)
        median = 1000 * statistics.median(took)
        found = (median, sum(count.values()), listed, records, len(keys) - records)
        rows.append([f"{service.name}: to outer step {last:,}", *found])
        lines.add("flat", service=service.name, outer_step=last, milliseconds=median, requests=count, records=records,
                  other_objects=len(keys) - records)  # fmt: skip
    return rows


def main() -> None:
    """Measure and print."""
    arguments = parse_arguments(str(__doc__))
    lines = Lines("buckets", arguments)
    torch.set_num_threads(1)
    rates: list[list[Cell]] = []
    times: list[list[Cell]] = []
    steps: list[list[Cell]] = []
    with workplace() as folder:
        write_text(folder)
        spec = demo_spec(folder, inner={"batch_size": 1, "sequence_length": 16})
        sync = {"in_flight": 1, "checkpoint_every": 3600.0, "sync_every": 3 * spec.config.sync.fragments}
        spec = replace(spec, config=changed(spec.config, sync=sync))
        tiny = replace(spec, config=changed(spec.config, model=TINY))
        for start in (s3, gs):
            with start() as service:
                for size, pairs in ((1 << 20, 40), (64 << 20, 10)):
                    pairs = pairs // 5 if arguments.quick else pairs
                    rates += throughput(service, service.server.port, "", size, pairs, lines)
                with Proxy(service.server.port, service.dialect) as proxy:
                    proxy.faults = Faults(upload_rate=LINK, download_rate=LINK)
                    way = f" at {LINK / 1e6:g} MB/s"
                    rates += throughput(service, proxy.port, way, 64 << 20, 2 if arguments.quick else 5, lines)
                times += stages(service, spec, 3 if arguments.quick else 15, lines)
                turns = {s3: 2000, gs: 600}[start]
                steps += flat(service, tiny, turns // 10 if arguments.quick else turns, lines)
    print_table(
        "Payloads of a run and the same bytes by a plain client, in turn",
        ("medians", "MB/s", "plain MB/s", "ratio", "quartiles of pairs"),
        rates,
    )
    print_table(
        "One outer step of three islands in a bucket, medians",
        ("stage", *(f"ms at {1000 * latency:.0f} ms" for latency in LATENCIES), "requests"),
        times,
    )
    print_table(
        "Outer steps of a tiny model, each quarter by itself",
        ("three islands", "ms / step", "requests / step", "listings / step", "records kept", "other objects"),
        steps,
    )
    lines.finish()


if __name__ == "__main__":
    main()
