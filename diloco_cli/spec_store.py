"""Where a spec keeps its blackboard: `[run] store` and the table `[store]`, put together to one URL."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

from diloco_runtime.config import Settings
from diloco_runtime.errors import ConfigError

BUCKETS = ("s3", "gs")
LEAST_HEARTBEAT = 5.0
"""Seconds: GCS and R2 refuse more than one write per second of one name, and every write costs money."""


class StoreTable(Settings):
    """How a bucket is reached; s3:// and gs:// only. No part of the run's identity."""

    endpoint: str | None = None
    """URL of the service, "https://ACCOUNT.r2.cloudflarestorage.com"; absent: AWS or Google Cloud."""
    region: str | None = None
    """s3. The bucket's region; absent: what AWS's tools are set to, "auto" with an endpoint."""
    credentials: str | None = None
    """Where credentials come from, never what they are. s3: "profile:NAME", "env:PREFIX" or "anonymous"; gs:
    "file:PATH", "env:NAME", "machine" or "anonymous"; absent: where the service's own tools look."""
    addressing: str | None = None
    """s3 with an endpoint. "path" or "virtual": the bucket's name in the path or in the host's name."""


def resolve_store(run: dict[str, Any], table: dict[str, Any], root: Path) -> tuple[str, list[str]]:
    """Return the store's URL, every path in it absolute, and what is wrong with it. Takes tables as written."""
    url = run.get("store")
    if not isinstance(url, str):
        return "", []  # absent or of a wrong type: reported with the shape of the file
    scheme, mark, rest = url.partition("://")
    where = f'[run] store = "{url}"'
    if not mark:
        return "", [f"{where}: not a URL; for a folder on this machine write file://{url or './blackboard'}"]
    if scheme in BUCKETS:
        return _resolve_bucket(url, table, root)
    if scheme == "memory":
        return "", [
            f"{where}: a memory store lives inside one process, and islands are processes of their own; "
            "write file://./blackboard"
        ]
    if scheme != "file":
        return "", [f"{where}: no such kind of store; write s3://bucket/folder, gs://bucket/folder or file://./folder"]
    if not rest:
        return "", [f"{where}: names no folder; write file://./blackboard"]
    problems = [
        f"[store] {key}: for s3:// and gs:// only; remove it" for key in table if key in StoreTable.model_fields
    ]
    return f"file://{(root / Path(rest).expanduser()).resolve()}", problems


def _resolve_bucket(url: str, table: dict[str, Any], root: Path) -> tuple[str, list[str]]:
    from diloco_runtime.store_address import parse_address

    place, mark, _ = url.partition("?")
    if mark:
        return "", [f'[run] store = "{place}?...": options belong into the table [store]']
    options = {key: value for key, value in table.items() if isinstance(value, str) and key in StoreTable.model_fields}
    kind, _, path = options.get("credentials", "").partition(":")
    if kind == "file" and path:
        options["credentials"] = f"file:{(root / Path(path).expanduser()).absolute()}"
    query = "&".join(f"{key}={quote(value, safe='')}" for key, value in options.items() if value)
    try:
        return parse_address(f"{place}?{query}").url, []
    except ConfigError as error:
        return "", [f"[run] {error}"]


def heartbeat_problems(url: str, heartbeat_every: float) -> list[str]:
    """Say so when heartbeats are more frequent than object stores allow."""
    if not url.startswith(tuple(f"{scheme}://" for scheme in BUCKETS)) or heartbeat_every >= LEAST_HEARTBEAT:
        return []
    return [
        f"[sync] heartbeat_every = {heartbeat_every:g}: object stores refuse frequent writes of one name, and bill "
        f"them; write {LEAST_HEARTBEAT:g} or more, or remove the key"
    ]
