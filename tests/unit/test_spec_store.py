"""Buckets in a spec: one URL from two tables, nothing secret in it, no heartbeat that an object store would refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco_cli.errors import SpecError
from diloco_cli.plan import Existing, make_plan
from diloco_cli.runs import place
from diloco_cli.spec import Spec, load_spec
from diloco_runtime.store import open_store

SPEC = """
[run]
name = "demo"
store = "{store}"
tokens = 1_000
[data]
files = ["a.txt"]
[islands.a]
"""


def load(folder: Path, store: str, added: str = "") -> Spec:
    (folder / "run.toml").write_text(SPEC.format(store=store) + added)
    return load_spec(folder / "run.toml")


def problems(folder: Path, store: str, added: str = "") -> str:
    with pytest.raises(SpecError) as refusal:
        load(folder, store, added)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("store", "table", "url"),
    [
        ("s3://bucket/a/b", "", "s3://bucket/a/b"),
        ("gs://bucket", "", "gs://bucket"),
        ("gs://bucket/", "", "gs://bucket"),
        (
            "s3://bucket/a",
            'endpoint = "https://x.r2.cloudflarestorage.com"\nregion = "auto"\ncredentials = "env:R2"',
            "s3://bucket/a?endpoint=https://x.r2.cloudflarestorage.com&region=auto&credentials=env:R2",
        ),
        ("s3://bucket/a", 'credentials = "profile:work"', "s3://bucket/a?credentials=profile:work"),
        ("s3://bucket/a", 'addressing = "virtual"', "s3://bucket/a?addressing=virtual"),
        ("gs://bucket/a", 'credentials = "machine"', "gs://bucket/a?credentials=machine"),
        ("gs://bucket/a", 'credentials = "file:/etc/key 1.json"', "gs://bucket/a?credentials=file:/etc/key%201.json"),
    ],
)
def test_one_url_is_made_of_both_tables(tmp_path: Path, store: str, table: str, url: str) -> None:
    spec = load(tmp_path, store, f"[store]\n{table}\n" if table else "")
    assert spec.store == url
    open_store(spec.store, spec.name)  # what the spec makes, a store takes; it asks nobody


def test_people_are_shown_the_place_alone(tmp_path: Path) -> None:
    spec = load(tmp_path, "s3://bucket/a", '[store]\ncredentials = "env:R2"\n')
    plan = make_plan(spec, Existing(), None)
    assert place(spec) == "s3://bucket/a/demo"
    assert plan.store == "s3://bucket/a" and plan.creates[0].startswith("s3://bucket/a/demo/run.json ")


def test_a_key_file_is_looked_for_beside_the_spec(tmp_path: Path) -> None:
    spec = load(tmp_path, "gs://bucket", '[store]\ncredentials = "file:keys/gcs.json"\n')
    assert spec.store == f"gs://bucket?credentials=file:{tmp_path}/keys/gcs.json"


@pytest.mark.parametrize(
    ("store", "table", "said"),
    [
        ("s3://bucket", 'credentials = "AKIAhunter2"', "credentials names where they come from, never what they are"),
        ("gs://bucket", 'credentials = "hunter2"', "file:PATH, env:NAME, machine or anonymous"),
        ("gs://bucket", 'region = "europe-west4"', "region and addressing are for s3:// only"),
        ("s3://bucket", 'endpoint = "https://a:hunter2@host"', "without a name or a password"),
        ("s3://bucket", "endpoint = 3", "[store] endpoint = 3: must be text in quotes"),
    ],
)
def test_wrong_options_are_named_and_secrets_not_repeated(tmp_path: Path, store: str, table: str, said: str) -> None:
    found = problems(tmp_path, store, f"[store]\n{table}\n")
    assert said in found and "hunter2" not in found


def test_heartbeats_on_a_bucket_are_at_most_one_in_five_seconds(tmp_path: Path) -> None:
    found = problems(tmp_path, "gs://bucket", "[sync]\nheartbeat_every = 1.0\n")
    assert "[sync] heartbeat_every = 1: object stores refuse frequent writes" in found and "write 5 or more" in found
    assert load(tmp_path, "gs://bucket", "[sync]\nheartbeat_every = 5.0\n").config.sync.heartbeat_every == 5.0
    assert load(tmp_path, "file://./bb", "[sync]\nheartbeat_every = 1.0\n").config.sync.heartbeat_every == 1.0
