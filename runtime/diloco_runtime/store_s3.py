"""`s3://`: a bucket of AWS, R2, Tigris, or of whatever else speaks S3 and honours `If-None-Match: *` on writes.

s3fs brings the session: credentials from wherever AWS's tools find them, their renewal, the connection pool. Requests
go to its client directly.
"""

from __future__ import annotations

import io
import os
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from diloco_runtime.store_address import Address
from diloco_runtime.store_cloud import (
    CHUNK,
    CONNECTIONS,
    LIMITS,
    BucketFacts,
    Limits,
    Page,
    Trouble,
    date_seconds,
    network_trouble,
    read_all,
)

if TYPE_CHECKING:
    import s3fs

_CONNECT_SECONDS = 10.0

_NO_KEYS = "give it credentials: see [store] credentials"
_WRONG_KEYS = "correct the keys that [store] credentials names"
_REGION = "name the bucket's region and endpoint: [store] region, endpoint"
_SPACE = "free or buy some space there"
_BUSY = Trouble("again", "it is overloaded or asks for fewer requests", "try again later")
_EXPIRED = Trouble("expired", "the credentials have expired", "renew them, for example with `aws sso login`")
_KEYS = Trouble("expired", "it does not know these credentials", _WRONG_KEYS)
_ELSEWHERE = Trouble("permanent", "the bucket is in another region", _REGION)
_FULL = Trouble("permanent", "no space or quota is left", _SPACE)

_BY_CODE = {
    "PreconditionFailed": Trouble("taken", "it exists"),
    # Two writers of one key at the same moment: the loser is told to try again, and finds out then.
    "ConditionalRequestConflict": Trouble("again", "another write of this key is under way"),
    "OperationAborted": Trouble("again", "another write of this key is under way"),
    "ExpiredToken": _EXPIRED,
    "ExpiredTokenException": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "InvalidToken": _EXPIRED,
    "InvalidAccessKeyId": _KEYS,
    "SignatureDoesNotMatch": _KEYS,
    "AccessDenied": Trouble(
        "permanent", "access denied", "let these credentials read, write, list and delete objects there"
    ),
    "AllAccessDisabled": Trouble("permanent", "all access to the bucket is disabled", "ask its owner"),
    "AccountProblem": Trouble("permanent", "the account has a problem", "ask the service"),
    "NoSuchBucket": Trouble("permanent", "there is no such bucket", "create it, or correct [run] store"),
    "InvalidBucketName": Trouble("permanent", "no bucket can have this name", "correct [run] store"),
    "RequestTimeTooSkewed": Trouble("permanent", "this machine's clock is wrong", "set it; timedatectl shows it"),
    "RequestExpired": Trouble("permanent", "this machine's clock is wrong", "set it; timedatectl shows it"),
    "PermanentRedirect": _ELSEWHERE,
    "AuthorizationHeaderMalformed": _ELSEWHERE,
    "IllegalLocationConstraintException": _ELSEWHERE,
    "QuotaExceeded": _FULL,
    "InsufficientStorage": _FULL,
    "XMinioStorageFull": _FULL,
    "NotImplemented": Trouble("permanent", "it does not know this request", "use a store with conditional writes"),
    "SlowDown": _BUSY,
    "TooManyRequests": _BUSY,
    "ServiceUnavailable": _BUSY,
    "InternalError": _BUSY,
    "RequestTimeout": _BUSY,
}


class S3Driver:
    """Requests to one bucket through aiobotocore."""

    def __init__(self, address: Address, limits: Limits = LIMITS) -> None:
        self._address = address
        self._limits = limits
        # Servers that keep objects as files tend to show folders that have lost their last object.
        self.phantom_folders = bool(address.endpoint)
        self._files: s3fs.S3FileSystem | None = None

    async def get(self, name: str) -> bytes | None:
        from botocore.exceptions import ClientError

        files, client = await self._client()
        try:
            answer = await client.get_object(Bucket=self._address.bucket, Key=name)
        except ClientError as error:
            if _code(error) == "NoSuchKey":
                return None
            raise
        async with answer["Body"] as body:
            data = await read_all(body.iter_chunks(CHUNK), self._limits)
        if len(data) != answer["ContentLength"]:
            raise ConnectionError(f"{len(data)} of {answer['ContentLength']} bytes came")
        del files  # kept until here: its end closes the connections
        return data

    async def put(self, name: str, data: bytes, new: bool) -> None:
        files, client = await self._client()
        condition = {"IfNoneMatch": "*"} if new else {}
        # A file object is sent piece by piece; plain bytes would hold up every other request meanwhile.
        await client.put_object(Bucket=self._address.bucket, Key=name, Body=io.BytesIO(data), **condition)
        del files

    async def page(self, prefix: str, delimiter: str, token: str, limit: int) -> Page:
        files, client = await self._client()
        options = {"Delimiter": delimiter} if delimiter else {}
        if token:
            options["ContinuationToken"] = token
        answer = await client.list_objects_v2(
            Bucket=self._address.bucket, Prefix=prefix, MaxKeys=limit, EncodingType="url", **options
        )
        del files
        return Page(
            [item["Key"] for item in answer.get("Contents", [])],
            [item["Prefix"] for item in answer.get("CommonPrefixes", [])],
            answer.get("NextContinuationToken", "") if answer.get("IsTruncated") else "",
        )

    async def delete(self, name: str) -> None:
        files, client = await self._client()
        await client.delete_object(Bucket=self._address.bucket, Key=name)
        del files

    def session(self) -> object:
        return self._files

    def renew(self, session: object) -> None:
        # Of many requests that are refused together, the first one renews for all.
        if self._files is session:
            self._files = None

    async def server_time(self) -> float | None:
        from botocore.exceptions import ClientError

        files, client = await self._client()
        try:
            answer: Any = await client.list_objects_v2(Bucket=self._address.bucket, MaxKeys=1)
        except ClientError as error:
            answer = error.response  # who refuses tells the time, too
        del files
        return date_seconds(answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", ""))

    async def bucket_facts(self) -> BucketFacts:
        files, client = await self._client()
        head = await _unless_refused(client.head_bucket(Bucket=self._address.bucket))
        versions = await _unless_refused(client.get_bucket_versioning(Bucket=self._address.bucket))
        del files
        keeps = (
            "the bucket keeps deleted objects as old versions, which cost like any other: turn versioning off, or let "
            "a lifecycle rule expire noncurrent versions"
        )
        headers = head.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        return BucketFacts(headers.get("x-amz-bucket-region", ""), keeps if versions.get("Status") else "")

    # ---- session ------------------------------------------------------------------------------------------------

    async def _client(self) -> tuple[s3fs.S3FileSystem, Any]:
        if self._files is None:
            self._files = _file_system(self._address, self._limits)
        files = self._files
        return files, await files.set_session()

    def judge(self, error: Exception) -> Trouble:
        from botocore import exceptions

        if isinstance(error, exceptions.ClientError):
            return _judge_answer(error)
        if isinstance(error, MissingKeys):
            return Trouble("permanent", str(error), _NO_KEYS)
        if isinstance(error, exceptions.NoCredentialsError | exceptions.PartialCredentialsError):
            return Trouble("permanent", "no credentials were found", _NO_KEYS)
        if isinstance(error, exceptions.ProfileNotFound):
            return Trouble("permanent", "~/.aws has no such profile", "correct [store] credentials")
        if isinstance(error, exceptions.SSOError | exceptions.TokenRetrievalError):
            return _EXPIRED
        if isinstance(error, exceptions.CredentialRetrievalError):
            return Trouble("again", "the credentials could not be fetched", "check where [store] credentials points")
        if isinstance(error, RecursionError):  # the library follows redirects that lead nowhere until this
            return _ELSEWHERE
        if found := network_trouble(error):
            return found
        if isinstance(error, exceptions.HTTPClientError):
            return Trouble("again", f"the connection failed: {error}", "check the endpoint and the network")
        return Trouble("permanent", f"{type(error).__name__}: {error}", "see --debug")


async def _unless_refused(request: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """Return an answer, an empty one when the service refuses the question."""
    from botocore.exceptions import ClientError

    try:
        return await request
    except ClientError:
        return {}


class MissingKeys(Exception):
    """Raised when the environment variables that the credentials are to come from are not set."""


def _judge_answer(error: Any) -> Trouble:
    """Tell what a refusal of the service means."""
    code = _code(error)
    if found := _BY_CODE.get(code):
        return found
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if status == 412:
        return _BY_CODE["PreconditionFailed"]
    if status in (408, 409, 429) or (status >= 500 and status not in (501, 507)):
        return _BUSY
    if status in (301, 307):
        return _ELSEWHERE
    if status == 403:
        return _BY_CODE["AccessDenied"]
    if status == 507:
        return _FULL
    message = error.response.get("Error", {}).get("Message", "")
    return Trouble("permanent", f"{code or status}: {message}", "check [run] store and [store]")


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _file_system(address: Address, limits: Limits) -> s3fs.S3FileSystem:
    import s3fs

    addressing = address.addressing or ("path" if address.endpoint else "auto")
    config = {
        "connect_timeout": _CONNECT_SECONDS,
        "read_timeout": limits.stall,
        "max_pool_connections": CONNECTIONS,
        # `CloudStore` repeats, so that the tries are counted and a deadline holds.
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        "s3": {"addressing_style": addressing},
        # Newer checksum headers are refused by several services; what matters carries hashes of its own.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    options: dict[str, Any] = {"endpoint_url": address.endpoint or None, "anon": address.credentials == "anonymous"}
    if address.region or address.endpoint:
        # Other services name theirs "auto", or take any name; SigV4 needs one.
        options["client_kwargs"] = {"region_name": address.region or _region_from_environment() or "auto"}
    kind, _, place = address.credentials.partition(":")
    if kind == "profile":
        options["profile"] = place
    if kind == "env":
        options.update(_keys_from_environment(place))
    return s3fs.S3FileSystem(config_kwargs=config, use_listings_cache=False, skip_instance_cache=True, **options)


def _region_from_environment() -> str:
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or ""


def _keys_from_environment(prefix: str) -> dict[str, str | None]:
    """Read PREFIX_ACCESS_KEY_ID, PREFIX_SECRET_ACCESS_KEY and, if there is one, PREFIX_SESSION_TOKEN."""
    names = [f"{prefix}_ACCESS_KEY_ID", f"{prefix}_SECRET_ACCESS_KEY"]
    if missing := [name for name in names if not os.environ.get(name)]:
        raise MissingKeys(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set")
    key, secret = (os.environ[name] for name in names)
    return {"key": key, "secret": secret, "token": os.environ.get(f"{prefix}_SESSION_TOKEN") or None}
