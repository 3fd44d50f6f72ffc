"""Buckets on test servers, as URLs that `open_store` takes."""

from __future__ import annotations

import json
import os
import urllib.request

from tests.support import servers

ENV = "DILOCO_TEST_S3"
"""Prefix of the environment variables that hold the test server's keys; children of the tests inherit them."""
S3_OPTIONS = f"&region=us-east-1&credentials=env:{ENV}"


def s3_bucket(server: servers.Server, bucket: str) -> str:
    """Create a bucket; return the URL of a folder in it."""
    import botocore.session

    os.environ[f"{ENV}_ACCESS_KEY_ID"] = servers.KEY
    os.environ[f"{ENV}_SECRET_ACCESS_KEY"] = servers.SECRET
    client = botocore.session.get_session().create_client(
        "s3", endpoint_url=server.url, aws_access_key_id=servers.KEY, aws_secret_access_key=servers.SECRET,
        region_name="us-east-1",
    )  # fmt: skip
    client.create_bucket(Bucket=bucket)
    client.close()
    return s3_url(server.url, bucket)


def s3_url(endpoint: str, bucket: str) -> str:
    return f"s3://{bucket}/folder?endpoint={endpoint}{S3_OPTIONS}"


def gs_bucket(server: servers.Server, bucket: str) -> str:
    """Create a bucket; return the URL of a folder in it."""
    body = json.dumps({"name": bucket}).encode()
    request = urllib.request.Request(
        f"{server.url}/storage/v1/b?project=tests", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        answer.read()
    return gs_url(server.url, bucket)


def gs_url(endpoint: str, bucket: str) -> str:
    return f"gs://{bucket}/folder?endpoint={endpoint}&credentials=anonymous"
