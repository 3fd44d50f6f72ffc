"""The plan: what is created, and sizes and requests that agree with the real model."""

import json
from pathlib import Path

import pytest

from diloco_cli.plan import Existing, gpt_parameters, make_plan
from diloco_cli.spec import Spec, load_spec
from diloco_runtime.config import ModelConfig
from diloco_runtime.gpt import build_gpt
from diloco_runtime.records import Fragment, TensorPiece


def spec(tmp_path: Path, more: str = "", model: str = "layers = 1\nheads = 2\nwidth = 16") -> Spec:
    data = '[data]\nfiles = ["a.txt"]' if "layers" in model else ""
    (tmp_path / "s.toml").write_text(
        f'[run]\nname = "demo"\nstore = "file://./bb"\ntokens = 5000\n{data}\n[model]\n{model}\n'
        f"[inner]\nbatch_size = 8\nsequence_length = 32\n{more}\n[islands.a]\n[islands.b]\nbatch_size = 2\n"
    )
    return load_spec(tmp_path / "s.toml")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("layers", "heads", "width"), [(1, 1, 8), (3, 4, 64)])
def test_parameters_are_those_of_the_real_model(tied: bool, layers: int, heads: int, width: int) -> None:
    config = ModelConfig(layers=layers, heads=heads, width=width, tied_embeddings=tied)
    model = build_gpt(config, 16, 0)
    assert gpt_parameters(config) == sum(p.numel() for p in model.parameters())


def test_a_new_run_creates_its_record_and_every_island(tmp_path: Path) -> None:
    plan = make_plan(spec(tmp_path), Existing(), None)
    record, islands = plan.creates
    assert record.startswith(f"file://{tmp_path.resolve()}/bb/demo/run.json")
    assert islands.startswith("2 islands of 3 processes each") and islands.endswith("a, b")
    assert plan.run_id is None and not plan.rents and plan.budget == 5000
    assert [(i.name, i.batch_size, i.state_dir) for i in plan.islands] == [("a", 8, None), ("b", 2, None)]


def test_what_exists_is_not_created_again(tmp_path: Path) -> None:
    existing = Existing(run_id="ab" * 8, log_position=7, phase="run", islands=("a", "b"))
    plan = make_plan(spec(tmp_path), existing, tmp_path / "home")
    assert plan.creates == ()
    assert all(island.exists for island in plan.islands)
    assert plan.islands[0].state_dir == str(tmp_path / "home" / "a")
    (rest,) = make_plan(spec(tmp_path), Existing(run_id="ab" * 8, islands=("a",)), None).creates
    assert rest.startswith("1 island of 3 processes") and rest.endswith(": b")


def test_bytes_per_outer_step(tmp_path: Path) -> None:
    estimate = make_plan(spec(tmp_path, "[sync]\nfragments = 4\nsync_every = 24"), Existing(), None).estimate
    assert estimate is not None and not estimate.measured
    total = gpt_parameters(ModelConfig(layers=1, heads=2, width=16))
    fragment = 4 * total // 4
    assert (estimate.parameters, estimate.fragments, estimate.inner_steps) == (total, 4, 6.0)
    assert estimate.offer_bytes == fragment
    assert estimate.commit_bytes == 2 * fragment, "parameters and momentum"
    assert estimate.up_bytes == 2 * fragment + 2 * fragment
    assert estimate.down_bytes == 2 * fragment + 2 * fragment + 2 * fragment
    assert estimate.tokens == (8 + 2) * 32 * 6


def test_bf16_halves_the_offers_and_nothing_else(tmp_path: Path) -> None:
    full = make_plan(spec(tmp_path), Existing(), None).estimate
    half = make_plan(spec(tmp_path, '[sync]\ncompression = "bf16"'), Existing(), None).estimate
    assert full is not None and half is not None
    assert abs(2 * half.offer_bytes - full.offer_bytes) <= 1
    assert half.commit_bytes == full.commit_bytes


def test_the_runs_own_fragment_table_beats_the_estimate(tmp_path: Path) -> None:
    piece = TensorPiece(name="w", shape=(10, 10), start=0, stop=10, merge="rda")
    existing = Existing(run_id="ab" * 8, table=(Fragment(pieces=(piece,)), Fragment(pieces=(piece,))))
    estimate = make_plan(spec(tmp_path), existing, None).estimate
    assert estimate is not None and estimate.measured
    assert (estimate.parameters, estimate.fragments, estimate.offer_bytes) == (200, 2, 400)


def test_a_custom_task_has_no_size_before_it_was_built(tmp_path: Path) -> None:
    assert make_plan(spec(tmp_path, model='kind = "mine:task"'), Existing(), None).estimate is None


def test_the_plan_is_json(tmp_path: Path) -> None:
    document = json.loads(json.dumps(make_plan(spec(tmp_path), Existing(), None).as_json()))
    assert document["schema_version"] == 1 and document["islands"][1]["batch_size"] == 2
