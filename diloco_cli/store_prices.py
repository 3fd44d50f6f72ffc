"""What the services behind a store charge for requests and for reading from elsewhere: lists of 2026, in dollars,
without discounts."""

from __future__ import annotations

from typing import NamedTuple


class RequestPrices(NamedTuple):
    """Dollars per million."""

    writes: float
    """Creates, puts and listings."""
    reads: float


_S3_AND_GCS = RequestPrices(5.0, 0.4)

_REQUESTS = {
    "file": RequestPrices(0.0, 0.0),
    "aws": _S3_AND_GCS,
    "google": _S3_AND_GCS,
    "r2": RequestPrices(4.5, 0.36),
    "other": _S3_AND_GCS,
}
"""Of a service that is not known here: as S3, rather than nothing."""

_EGRESS = {
    "file": "none: a folder of this machine",
    "aws": "0 $/GB within the bucket's region, 0.02 to other regions of AWS, 0.09 elsewhere (first 10 TB a month)",
    "google": "0 $/GB within the bucket's location, 0.02 and more to other regions of Google, 0.12 elsewhere",
    "r2": "0 $/GB",
    "other": "unknown here: ask the service",
}


def request_prices(url: str) -> RequestPrices:
    """Return what requests to the store at `url` cost."""
    return _REQUESTS[_service(url)]


def egress(url: str) -> str:
    """Return in words what reading from the store at `url` costs elsewhere."""
    return _EGRESS[_service(url)]


def _service(url: str) -> str:
    if url.startswith("file://"):
        return "file"
    if "endpoint=" in url:
        return "r2" if ".r2.cloudflarestorage.com" in url else "other"
    return "aws" if url.startswith("s3://") else "google"
