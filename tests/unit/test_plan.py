"""The plan: what is created, and sizes and requests that agree with the real model."""

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from diloco_cli.estimate import Estimate, gpt_parameters, supervision
from diloco_cli.plan import Existing, make_plan
from diloco_cli.simulation.run import Simulation, Site
from diloco_cli.simulation.storage import Bucket, Link
from diloco_cli.spec import Spec, load_spec
from diloco_cli.views import print_plan
from diloco_runtime.config import ModelConfig
from diloco_runtime.gpt import build_gpt
from diloco_runtime.records import Fragment, TensorPiece
from tests.support.tasks import LinearTask


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


def estimate(tmp_path: Path, more: str = "", existing: Existing | None = None) -> Estimate:
    found = make_plan(spec(tmp_path, more), existing or Existing(), None).estimate
    assert found is not None
    return found


def of_size(parameters: int, fragments: int = 6) -> Existing:
    """Return what exists of a run whose model has so many parameters."""
    piece = TensorPiece(name="w", shape=(parameters // fragments,), start=0, stop=parameters // fragments, merge="rda")
    return Existing(run_id="ab" * 8, table=(Fragment(pieces=(piece,)),) * fragments)


def test_bytes_per_outer_step(tmp_path: Path) -> None:
    found = estimate(tmp_path, "[sync]\nfragments = 4\nsync_every = 24")
    total = gpt_parameters(ModelConfig(layers=1, heads=2, width=16))
    fragment = 4 * total // 4
    assert (found.measured, found.parameters, found.fragments, found.inner_steps) == (False, total, 4, 6.0)
    assert found.offer_bytes == fragment
    assert found.commit_bytes == 2 * fragment, "parameters and momentum"
    assert found.up_bytes == 2 * fragment + 2 * fragment
    assert found.down_bytes == 2 * fragment + 2 * fragment, "offers to the syncer, parameters to every island"
    assert found.tokens == (8 + 2) * 32 * 6
    assert (found.checkpoint_bytes, found.checkpoint_every) == (8 * total, 60.0), "two moments of AdamW"
    assert found.warnings == ()


def test_without_momentum_a_commit_is_parameters_alone(tmp_path: Path) -> None:
    full, bare = estimate(tmp_path), estimate(tmp_path, "[outer]\nmomentum = 0.0")
    assert full.commit_bytes == 2 * bare.commit_bytes
    assert full.up_bytes - bare.up_bytes == bare.commit_bytes
    assert (full.writes - bare.writes, full.reads - bare.reads) == (1, 0)
    assert full.down_bytes == bare.down_bytes, "nobody downloads momentum"


def test_sgd_has_no_moments_to_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(spec(tmp_path).path.read_text().replace("[inner]", '[inner]\noptimizer = "sgd"'))
    found = make_plan(load_spec(tmp_path / "s.toml"), Existing(), None).estimate
    assert found is not None and found.checkpoint_bytes == 0


def test_a_syncer_that_needs_too_much_bandwidth_is_warned_of(tmp_path: Path) -> None:
    large = estimate(tmp_path, existing=of_size(1_200_000_000))
    # Two offers of 0.8 GB, and a commit of 1.6 GB, every four steps of a second.
    assert (round(large.syncer_down_gbits, 3), round(large.syncer_up_gbits, 3)) == (3.2, 3.2)
    (warning,) = large.warnings
    assert "3.2 Gbit/s" in warning and "sync.sync_every (now 24)" in warning and 'compression = "bf16"' in warning
    light = estimate(tmp_path, '[sync]\ncompression = "bf16"', of_size(1_200_000_000))
    assert (round(light.syncer_down_gbits, 3), round(light.syncer_up_gbits, 3)) == (1.6, 3.2)
    assert "bf16" not in light.warnings[0], "no remedy that is in use already"
    assert estimate(tmp_path, "[sync]\nsync_every = 100", of_size(1_200_000_000)).warnings == ()


def test_the_plan_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(make_plan(spec(tmp_path), of_size(1_200_000_000), None))
    said = " ".join(capsys.readouterr().out.split())
    # Each of these payloads is 24 shards.
    assert "an offer is 800 MB, a commit 1.60 GB; up 3.20 GB, down 3.20 GB, 102 writes and 107 reads" in said
    assert "at 1 s per inner step: the merging syncer needs 3.20 Gbit/s down and 3.20 Gbit/s up" in said
    assert "checkpoints: 9.60 GB per island every 60 s" in said
    assert "! between clouds 3.2 Gbit/s are more than a syncer can count on" in said


# ---- the estimate against real islands ------------------------------------------------------------------------------


class Requests:
    """Counts what crosses links, by verb ("miss": a read that finds nothing), kind of object and seq (-1: has none)."""

    def __init__(self, bucket: Bucket, links: Iterable[Link]) -> None:
        self.asked: Counter[tuple[str, str, int]] = Counter()
        self._bucket = bucket
        for link in links:
            link.trap = self._note

    def _note(self, moment: str, verb: str, key: str) -> None:
        if moment != "before":
            return
        _, kind, *rest = [*key.split("/"), ""]
        seq = re.match(r"\d{12}", rest[0]) if kind in ("log", "calls", "offers", "blobs") else None
        kind = rest[1].split("-")[0] or kind if kind == "blobs" else kind
        verb = "miss" if verb == "get" and key not in self._bucket.objects else verb
        self.asked[verb, kind, int(seq[0]) if seq else -1] += 1

    def per_commit(self, verb: str, kind: str, first: int, last: int) -> float:
        """Return the mean over the merges from `first` to before `last`."""
        return sum(self.asked[verb, kind, seq] for seq in range(first, last)) / (last - first)

    def total(self) -> int:
        """Count all requests but those for data units, which depend on the data set."""
        return sum(count for (_, kind, _), count in self.asked.items() if kind != "data")


@pytest.mark.parametrize(("islands", "momentum"), [(3, 0.5), (2, 0.0)])
def test_the_estimate_is_what_islands_do(tmp_path: Path, islands: int, momentum: float) -> None:
    names, first, last = "abc"[:islands], 12, 24
    (tmp_path / "s.toml").write_text(
        '[run]\nname = "x"\nstore = "file://./bb"\ntokens = 1_000_000_000\n'
        '[model]\nkind = "tests.support.tasks:linear"\n'
        f'[inner]\noptimizer = "sgd"\nbatch_size = 8\n[outer]\nmomentum = {momentum}\n[sync]\nfragments = 2\n'
        + "".join(f"[islands.{name}]\n" for name in names)
    )
    settings = load_spec(tmp_path / "s.toml")
    plan = make_plan(settings, of_size(200, 2), None).estimate
    assert plan is not None
    run = Simulation(settings.config, LinearTask, dict.fromkeys(names, Site(1.0)))
    requests = Requests(run.bucket, [machine.link for machine in run.machines.values()])
    watching = Requests(run.bucket, [run.laptop.link])
    run.train()
    board = run.observer()
    assert run.run_until(lambda: board.read_commit(last + 2) is not None, 2000.0)
    seconds = run.world.now
    run.close()
    moved = {
        name: [requests.per_commit(verb, name, first, last) for verb in ("put", "get")]
        for name in ("delta", "params", "momentum")
    }
    params = 4 * 100
    for way, planned in enumerate((plan.up_bytes, plan.down_bytes)):
        parameters = moved["params"][way] + moved["momentum"][way]
        assert moved["delta"][way] * plan.offer_bytes + parameters * params == planned
    background = plan.background_per_second - supervision(islands, settings.config.sync)
    expected = (plan.writes + plan.reads) / plan.inner_steps + background
    assert requests.total() / seconds == pytest.approx(expected, rel=0.1)
    assert watching.total() / seconds == pytest.approx(supervision(islands, settings.config.sync), rel=0.1)


def test_bf16_halves_the_offers_and_nothing_else(tmp_path: Path) -> None:
    full, half = estimate(tmp_path), estimate(tmp_path, '[sync]\ncompression = "bf16"')
    assert abs(2 * half.offer_bytes - full.offer_bytes) <= 1
    assert half.commit_bytes == full.commit_bytes


def test_the_runs_own_fragment_table_beats_the_estimate(tmp_path: Path) -> None:
    piece = TensorPiece(name="w", shape=(10, 10), start=0, stop=10, merge="rda")
    existing = Existing(run_id="ab" * 8, table=(Fragment(pieces=(piece,)), Fragment(pieces=(piece,))))
    found = estimate(tmp_path, existing=existing)
    assert found.measured
    assert (found.parameters, found.fragments, found.offer_bytes) == (200, 2, 400)


def test_a_custom_task_has_no_size_before_it_was_built(tmp_path: Path) -> None:
    assert make_plan(spec(tmp_path, model='kind = "mine:task"'), Existing(), None).estimate is None


def test_the_plan_is_json(tmp_path: Path) -> None:
    document = json.loads(json.dumps(make_plan(spec(tmp_path), Existing(), None).as_json()))
    assert document["schema_version"] == 1 and document["islands"][1]["batch_size"] == 2
