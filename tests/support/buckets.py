"""Places in buckets on test servers, as URLs that `open_store` takes.

Each server has one bucket, and each test a folder in it: SeaweedFS sets space aside for every bucket, and runs out.
"""

from __future__ import annotations

import json
import os
import urllib.request

from tests.support import servers

BUCKET = "diloco-tests"
ENV = "DILOCO_TEST_S3"
"""Prefix of the environment variables that hold the test server's keys; children of the tests inherit them."""


def make_s3_bucket(server: servers.Server) -> None:
    """Create the bucket."""
    import botocore.session

    client = botocore.session.get_session().create_client(
        "s3", endpoint_url=server.url, region_name="us-east-1",
        aws_access_key_id=servers.ADMIN_KEY, aws_secret_access_key=servers.ADMIN_SECRET,
    )  # fmt: skip
    client.create_bucket(Bucket=BUCKET)
    client.close()


def make_gs_bucket(server: servers.Server) -> None:
    """Create the bucket."""
    body, headers = json.dumps({"name": BUCKET}).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}/storage/v1/b?project=tests", body, headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        answer.read()


def s3_url(endpoint: str, folder: str) -> str:
    """Return the URL of a folder; the keys that it names are in the environment from now on."""
    os.environ[f"{ENV}_ACCESS_KEY_ID"] = servers.KEY
    os.environ[f"{ENV}_SECRET_ACCESS_KEY"] = servers.SECRET
    return f"s3://{BUCKET}/{folder}?endpoint={endpoint}&region=us-east-1&credentials=env:{ENV}"


def gs_url(endpoint: str, folder: str) -> str:
    """Return the URL of a folder."""
    return f"gs://{BUCKET}/{folder}?endpoint={endpoint}&credentials=anonymous"
