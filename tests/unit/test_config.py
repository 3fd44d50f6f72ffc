"""Defaults that follow from other settings, and settings that are refused with their remedy."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from diloco_runtime.config import RunConfig, SyncConfig


def config(**tables: Any) -> RunConfig:
    return RunConfig.model_validate({"name": "trial", "tokens": 1000, "data": {"files": ["a.txt"]}, **tables})


def test_the_default_is_decoupled() -> None:
    sync = config().sync
    assert (sync.preset, sync.sync_every, sync.fragments, sync.min_quorum) == ("decoupled", 24, 6, 1)
    assert sync.pace == "fastest"
    assert sync.carry
    assert sync.overlap_steps is None
    assert sync.in_flight is None


def test_streaming_waits_for_all_within_one_fragment_period() -> None:
    sync = config(sync={"preset": "streaming"}).sync
    assert (sync.min_quorum, sync.pace, sync.carry, sync.sync_every) == ("all", "each", False, 100)
    assert sync.overlap_steps == 100 // 6
    assert config(sync={"preset": "streaming", "sync_every": 3, "fragments": 6}).sync.overlap_steps == 1


def test_diloco_is_one_fragment_and_a_barrier() -> None:
    sync = config(sync={"preset": "diloco"}).sync
    assert (sync.fragments, sync.overlap_steps, sync.min_quorum, sync.sync_every) == (1, 0, "all", 500)


def test_what_is_written_wins_over_the_preset() -> None:
    sync = config(sync={"preset": "diloco", "sync_every": 30, "min_quorum": 2, "fragments": 3, "carry": True}).sync
    assert (sync.sync_every, sync.min_quorum, sync.fragments, sync.carry, sync.overlap_steps) == (30, 2, 3, True, 0)


@pytest.mark.parametrize(
    ("sync", "momentum", "merge"),
    [
        ({}, 0.5, "rda"),
        ({"sync_every": 99}, 0.5, "rda"),
        ({"sync_every": 100}, 0.9, "rda"),
        ({"preset": "streaming"}, 0.9, "mean"),
        ({"preset": "streaming", "sync_every": 24}, 0.5, "mean"),
        ({"preset": "diloco"}, 0.9, "mean"),
    ],
)
@pytest.mark.parametrize("as_object", [False, True])
def test_outer_defaults_follow_the_period_and_the_preset(
    sync: dict[str, Any], momentum: float, merge: str, as_object: bool
) -> None:
    outer = config(sync=SyncConfig(**sync) if as_object else sync).outer
    assert (outer.lr, outer.momentum, outer.merge) == (0.7, momentum, merge)


def test_written_outer_settings_win() -> None:
    outer = config(outer={"momentum": 0.0, "lr": 1.0}, sync={"preset": "diloco"}).outer
    assert (outer.momentum, outer.lr, outer.merge) == (0.0, 1.0, "mean")


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"sync": {"preset": "streaming", "sync_every": 60}},
        {"sync": {"preset": "diloco"}, "outer": {"momentum": 0.3}},
        {"model": {"kind": "package.module:build", "options": {"width": 3}}, "data": {}},
    ],
)
def test_the_resolved_form_means_the_same(tables: dict[str, Any]) -> None:
    """`run.json` holds the resolved form; every island has to read from it what the author of the run meant."""
    resolved = config(**tables)
    assert RunConfig.model_validate(resolved.model_dump(mode="json")) == resolved
    assert RunConfig.model_validate_json(resolved.model_dump_json()) == resolved


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({"tokens": 0}, "greater than 0"),
        ({"token": 5}, "Extra inputs"),
        ({"sync": {"sync_evry": 5}}, "Extra inputs"),
        ({"data": {}}, "data.files is empty"),
        ({"model": {"width": 100, "heads": 3}}, "width = 100 is not a multiple of heads = 3"),
        ({"model": {"options": {"x": 1}}}, "options belongs to custom tasks"),
        ({"model": {"kind": "hf"}}, 'neither "gpt" nor'),
        ({"model": {"kind": "a:b:c"}}, 'neither "gpt" nor'),
        ({"model": {"kind": "../evil:f"}}, 'neither "gpt" nor'),
        ({"model": {"kind": "a:b", "width": 128}}, 'width belongs to kind = "gpt"'),
        ({"sync": {"fragments": 2, "in_flight": 3}}, "in_flight = 3 is more than fragments = 2"),
        ({"sync": {"preset": "diloco", "in_flight": 2}}, "in_flight = 2 is more than fragments = 1"),
        ({"sync": {"preset": "nonsense"}}, "preset"),
        ({"sync": {"min_quorum": "most"}}, "min_quorum"),
        ({"sync": {"heartbeat_every": 0.1}}, "heartbeat_every"),
        ({"sync": 3}, "sync"),
        ({"outer": 3}, "outer"),
        ({"inner": {"lr": 0}}, "lr"),
    ],
)
def test_what_cannot_be_is_refused(tables: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        config(**tables)


def test_settings_do_not_change_afterwards() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        config().sync.sync_every = 5  # type: ignore[misc]
