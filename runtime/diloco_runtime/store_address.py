"""The URL of a bucket: service, bucket, folder, and the options that a spec's `[store]` becomes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, urlsplit

from diloco_runtime.errors import ConfigError
from diloco_runtime.store import is_key

_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_SOURCES = {
    "s3": re.compile(r"|anonymous|profile:[^\s?&#]+|env:[A-Za-z_][A-Za-z0-9_]*"),
    "gs": re.compile(r"|anonymous|machine|file:[^?&#]+|env:[A-Za-z_][A-Za-z0-9_]*"),
}
SOURCES = {
    "s3": "profile:NAME, env:PREFIX or anonymous",
    "gs": "file:PATH, env:NAME, machine or anonymous",
}
"""What `credentials` may say for each service, in words."""
OPTIONS = ("endpoint", "region", "credentials", "addressing")


@dataclass(frozen=True)
class Address:
    """`s3://bucket/folder?endpoint=...&region=...&credentials=...`, taken apart. Holds no secret, only its place."""

    scheme: str
    bucket: str
    folder: str = ""
    endpoint: str = ""
    """http(s)://host[:port] of a service that is not AWS or Google's own."""
    region: str = ""
    credentials: str = ""
    """Where credentials come from; empty: where the service's own tools look for them."""
    addressing: str = ""
    """"path" (https://host/bucket) or "virtual" (https://bucket.host); S3 with an endpoint only."""

    @property
    def place(self) -> str:
        """Return the URL without options: how messages call it."""
        return f"{self.scheme}://{self.bucket}" + (f"/{self.folder}" if self.folder else "")

    @property
    def url(self) -> str:
        """Return the whole URL, always spelled the same way."""
        options = [(name, getattr(self, name)) for name in OPTIONS if getattr(self, name)]
        query = "&".join(f"{name}={quote(value, safe=':/@.~-')}" for name, value in options)
        return self.place + (f"?{query}" if query else "")


def parse_address(url: str) -> Address:
    """Take a bucket's URL apart; raise `ConfigError` with a remedy when it cannot be used."""
    parts = urlsplit(url)
    # Messages never repeat what stands where somebody may have written a secret.
    if "@" in parts.netloc:
        raise ConfigError(
            f'store = "{parts.scheme}://...@...": holds a name or a password; name their source instead, '
            "in [store] credentials"
        )
    where = f'store = "{parts.scheme}://{parts.netloc}{parts.path}"'
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if any("=" not in option for option in parts.query.split("&") if option) or parts.fragment:
        raise ConfigError(f"{where}: options are written ?name=value&name=value")
    if unknown := [name for name in options if name not in OPTIONS]:
        raise ConfigError(f"{where}: unknown option {unknown[0]}; known are {', '.join(OPTIONS)}")
    folder = parts.path.strip("/")
    if _BUCKET.fullmatch(parts.netloc) is None:
        raise ConfigError(f"{where}: names no bucket; write {parts.scheme}://bucket/folder")
    if folder and not is_key(folder):
        raise ConfigError(f"{where}: the folder may have letters, digits, dots, dashes and slashes only")
    address = Address(parts.scheme, parts.netloc, folder, **options)
    _check_options(address, where)
    return address


def _check_options(address: Address, where: str) -> None:
    endpoint = urlsplit(address.endpoint)
    if address.endpoint and (endpoint.scheme not in ("http", "https") or not endpoint.netloc or "@" in endpoint.netloc):
        raise ConfigError(f"{where}: endpoint must be a URL such as https://host, without a name or a password")
    if _SOURCES[address.scheme].fullmatch(address.credentials) is None:
        raise ConfigError(
            f"{where}: credentials names where they come from, never what they are: {SOURCES[address.scheme]}; "
            "absent: where the service's own tools look"
        )
    if address.addressing not in ("", "path", "virtual"):
        raise ConfigError(f'{where}: addressing must be "path" or "virtual"')
    if address.scheme == "gs" and (address.region or address.addressing):
        raise ConfigError(f"{where}: region and addressing are for s3:// only")
