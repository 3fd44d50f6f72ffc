"""A folder in a bucket of a real server, reached both directly and through a proxy that can make anything go wrong."""

from __future__ import annotations

from dataclasses import dataclass

from diloco_runtime.store import ObjectStore
from diloco_runtime.store_address import parse_address
from diloco_runtime.store_cloud import CloudStore, Limits
from diloco_runtime.store_gcs import GcsDriver
from diloco_runtime.store_s3 import S3Driver
from tests.support import buckets
from tests.support.proxy import Proxy

HASTY = Limits(stall=1.0, patience=2.0)
"""Limits for tests of what happens when they are reached."""


@dataclass(frozen=True)
class Cloud:
    """One folder. `direct` sees what is really there."""

    kind: str
    folder: str
    direct: ObjectStore
    proxy: Proxy

    def url(self) -> str:
        """Return the URL that leads through the proxy."""
        url = buckets.s3_url if self.kind == "s3" else buckets.gs_url
        return url(self.proxy.url, self.folder)

    def store(self, limits: Limits | None = None, url: str = "") -> CloudStore:
        """Open the bucket through the proxy."""
        return open_with(url or self.url(), limits or Limits())


def open_with(url: str, limits: Limits) -> CloudStore:
    """Open a bucket as `open_store` does, with limits of one's own."""
    address = parse_address(url)
    driver = S3Driver(address, limits) if address.scheme == "s3" else GcsDriver(address, limits)
    return CloudStore(address, "trial", driver, limits)
