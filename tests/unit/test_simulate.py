"""`diloco simulate`: the case of a spec, the table of settings, words, document and picture, what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco_cli import simulate as simulation
from diloco_cli.__main__ import main
from diloco_cli.errors import SpecError
from diloco_cli.simulate import ON_TIME, Row, best_of, compare, neighbours, patiences, simulate
from diloco_cli.simulate_case import Setting, forecast, make_case, replay, setting_of, with_setting
from diloco_cli.simulation.forecast import Window
from diloco_cli.simulation.forecast_failures import Loss
from diloco_cli.simulation.forecast_result import Result
from diloco_cli.spec import Spec, load_spec

GPT = '[data]\nfiles = ["a.txt"]\n[model]\nlayers = 1\nheads = 1\nwidth = 64\n'
FAST = "step_spread = 0.0\nstart_seconds = 10.0\nrecovery_seconds = 30.0\n"


@pytest.fixture(autouse=True)
def short_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "STEPS_PER_ROW", 1200)


def write(folder: Path, simulate_table: str = "", rest: str = GPT, tokens: int = 4_000_000) -> Path:
    path = folder / "demo.toml"
    path.write_text(
        f'[run]\nname = "demo"\nstore = "file://./bb"\ntokens = {tokens}\n{rest}\n[simulate]\n{FAST}{simulate_table}\n'
        "[islands.a]\n[islands.b]\nbatch_size = 8\n[islands.b.simulate]\nstep_seconds = 1.5\nmtbf_hours = 0\n"
    )
    return path


def spec(folder: Path, *args: Any, **kwargs: Any) -> Spec:
    return load_spec(write(folder, *args, **kwargs))


# ---- the spec -------------------------------------------------------------------------------------------------------


def test_an_island_overrides_what_is_assumed_of_all(tmp_path: Path) -> None:
    a, b = spec(tmp_path, "latency = 0.2\nmtbf_hours = 3").islands
    assert (a.assumed.step_seconds, a.assumed.mtbf_hours, a.assumed.latency) == (1.0, 3.0, 0.2)
    assert (b.assumed.step_seconds, b.assumed.mtbf_hours, b.assumed.latency) == (1.5, 0.0, 0.2)


def test_assumptions_are_no_part_of_a_runs_identity(tmp_path: Path) -> None:
    assert spec(tmp_path).config == spec(tmp_path, "step_spread = 0.1".replace("step_spread", "latency")).config


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("mtbf_hours = 0", "mtbf_hour = 1", "[islands.b.simulate] mtbf_hour: unknown key; did you mean mtbf_hours?"),
        ("mtbf_hours = 0", "parameters = 1", "[islands.b.simulate] parameters: unknown key; it belongs to [simulate]"),
        ("mtbf_hours = 0", "latency = -1", "[islands.b.simulate] latency = -1: must be greater than or equal to 0"),
        ("mtbf_hours = 0", 'up_gbits = "2"', '[islands.b.simulate] up_gbits = "2": must be a number (Gbit/s from'),
        ("start_seconds = 10.0", "start_seconds = inf", "[simulate] start_seconds: nan and inf are no settings"),
        ("start_seconds = 10.0", "up_gbits = 0", "[simulate] up_gbits = 0: must be greater than 0"),
        ("start_seconds = 10.0", "sync_every = 3", "[simulate] sync_every: unknown key; it belongs to [sync]"),
    ],
)
def test_what_is_wrong_with_an_assumption_is_said(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = write(tmp_path)
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    (line,) = caught.value.problems
    assert line.startswith(f"demo.toml: {said}")


def test_sizes_are_those_of_the_plan(tmp_path: Path) -> None:
    case = make_case(spec(tmp_path), 0)
    total = 256 * 64 + 12 * 64**2 + 2 * 64 + 64
    assert case.sizes.parameters == total
    assert case.sizes.offer == case.sizes.params == case.sizes.momentum == pytest.approx(4 * total / 6)
    assert case.sizes.checkpoint == 8 * total
    assert [place.tokens for place in case.places] == [16 * 128, 8 * 128]


def test_a_model_of_ones_own_needs_its_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = '[model]\nkind = "mine:task"\n'
    assert main(["simulate", str(write(tmp_path, rest=own))]) == 2
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1
    assert "demo.toml: [simulate] parameters: missing" in said.err
    case = make_case(spec(tmp_path, "parameters = 1000\ntokens_per_sample = 5", rest=own), 0)
    assert case.sizes.parameters == 1000 and case.places[0].tokens == 16 * 5


# ---- the table ------------------------------------------------------------------------------------------------------


def row(setting: Setting, eta: float | None, cost: float, base: Result, fits: bool = True, part: float = 1.0) -> Row:
    return Row(setting, replace(base, eta_seconds=eta, cost=cost, participation=part), fits)


def test_the_best_is_the_soonest_then_the_cheapest_then_the_most_often_synchronised(tmp_path: Path) -> None:
    of = spec(tmp_path)
    _, base = forecast(of, make_case(of, 0), Window(commits=30))
    slow, fast = Setting(6, 3, 1, 0.0), Setting(24, 3, 1, 0.0)
    cheap, cheaper, misfit = Setting(48, 3, 1, 0.0), Setting(96, 3, 1, 0.0), Setting(192, 3, 1, 0.0)
    rows = [
        row(slow, 120.0, 1.0, base),
        row(fast, 100.0, 20.0, base),
        row(cheap, 100.5, 10.3, base),
        row(cheaper, 100.9, 10.0, base),
        row(misfit, 50.0, 1.0, base, fits=False),
    ]
    best = best_of(rows, fast)
    assert best is not None and best.setting == cheap, "3 % of the costs are no reason to synchronise half as often"
    patient = replace(cheap, min_quorum=2)
    equal = [row(patient, 100.0, 10.0, base), row(cheap, 100.1, 10.0, base)]
    best = best_of(equal, fast)
    assert best is not None and best.setting == cheap, "what makes no difference stays as it is"
    assert best_of([row(misfit, 50.0, 1.0, base, fits=False), row(slow, None, 0.0, base)], fast) is None


def test_settings_are_tried_around_the_specs(tmp_path: Path) -> None:
    own = Setting(24, 6, 1, 0.05)
    around = neighbours(own, fixed_fragments=False)
    assert own in around and len(around) == len(set(around)) == 12
    assert {setting.fragments for setting in neighbours(own, fixed_fragments=True)} == {6}
    assert {(s.min_quorum, s.min_grace) for s in patiences(own, 3, 4.0)} == {
        (quorum, grace) for quorum in (1, 2, 3) for grace in (0.05, 2.0)
    }


def test_the_overlap_of_a_preset_follows_the_setting(tmp_path: Path) -> None:
    of = spec(tmp_path, rest=GPT + '[sync]\npreset = "streaming"\n')
    case = make_case(of, 0)
    assert case.config.sync.overlap_steps == 100 // 6
    other = with_setting(of, case, replace(setting_of(case), sync_every=200, fragments=3))
    assert other.config.sync.overlap_steps == 200 // 3 and len(other.sizes.table) == 3


def test_a_setting_whose_merges_lag_behind_does_not_fit(tmp_path: Path) -> None:
    of = spec(tmp_path, "parameters = 50_000_000\nup_gbits = 0.2\ndown_gbits = 1.0")
    rows = compare(of, make_case(of, 0))
    by_period = {r.setting.sync_every: r for r in rows if (r.setting.fragments, r.setting.min_quorum) == (6, 1)}
    # The author sends 67 MB per commit over 25 MB/s: more than the 2 s between two merges that 12 steps ask for.
    assert not by_period[12].fits and by_period[12].result.pace < ON_TIME
    assert by_period[12].result.commit_seconds > 67 / 25  # type: ignore[operator]
    assert by_period[96].fits and by_period[96].result.pace == pytest.approx(1.0, abs=0.1)
    best = best_of(rows, setting_of(make_case(of, 0)))
    assert best is not None and best.fits


def test_a_recorded_tape_of_kills_is_replayed(tmp_path: Path) -> None:
    of = spec(tmp_path)
    kills = [Loss(100.0, "a"), Loss(200.0, "b"), Loss(200.1, "b")]
    outcome, found = replay(of, kills, 400.0)
    assert outcome.end.seconds == pytest.approx(400.0, abs=2.0) and outcome.skipped_seconds == 0.0
    assert [outcome.end.islands[name].losses for name in "ab"] == [1.0, 1.0], "nobody is killed twice"
    _, calm = replay(of, [], 400.0)
    assert calm.goodput is not None and found.goodput is not None and calm.goodput > found.goodput + 0.02
    slow = {"a": of.islands[0].assumed.model_copy(update={"step_seconds": 2.0})}
    slowed, _ = replay(of, [], 400.0, slow)
    assert slowed.end.islands["a"].steps == pytest.approx(195, abs=2)


# ---- the command ----------------------------------------------------------------------------------------------------

PRICES = "mtbf_hours = 0\negress_up = 0.02\negress_down = 0.01\nprice_per_hour = 3.0\nprice_per_million_writes = 5.0\n"


def test_the_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, PRICES)
    assert main(["simulate", str(path), "--json", "--seed", "7", "--commits", "80"]) == 0
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert said.err == "" and document["schema_version"] == 1 and document["seed"] == 7
    assert document["step_seconds_assumed"] and document["assumed"]["b"]["step_seconds"] == 1.5
    assert document["simulated_commits"] <= 80
    found = document["result"]
    assert 0.9 < found["goodput"] <= 1.0 and found["eta_seconds"] > 0.0
    days = found["eta_seconds"] / 86_400.0
    per_day = found["egress_per_day"] + found["requests_per_day"] + found["machines_per_day"]
    assert found["cost"] == pytest.approx(per_day * days)
    up, down = found["up_bytes_per_second"], found["down_bytes_per_second"]
    assert found["egress_per_day"] == pytest.approx(86_400.0 * (0.02 * up + 0.01 * down) / 1e9)
    assert found["machines_per_day"] == pytest.approx(2 * 3.0 * 24.0, rel=0.02)
    assert document["best"] in [row["setting"] for row in document["settings"]]
    assert main(["simulate", str(path), "--json", "--seed", "7", "--commits", "80"]) == 0
    assert json.loads(capsys.readouterr().out) == document, "one seed, one forecast"


def test_a_folder_costs_nothing_and_nothing_is_created(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path)
    assert main(["simulate", str(path), "--commits", "60"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "1 to 1.5 s per inner step (not in the spec: measure it" in said
    assert "per day: egress $0.00, requests $0.00, machines $0.00" in said
    assert "best setting: sync_every = " in said and "loss is not predicted" in said
    assert {entry.name for entry in tmp_path.iterdir()} == {"demo.toml"}


def test_it_says_when_the_budget_is_out_of_reach(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "mtbf_hours = 0.001")
    path.write_text(
        path.read_text().replace("mtbf_hours = 0\n", "").replace("start_seconds = 10.0", "start_seconds = 90.0")
    )
    assert main(["simulate", str(path)]) == 0
    said = capsys.readouterr().out
    assert (
        "! the budget is never met: no outer step within provider.stalled_after" in said and "! no setting fits" in said
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--plot", "x.pdf"], "--plot x.pdf: name a file that ends in .png"),
        (["--plot", "none/x.png"], "--plot none/x.png: there is no folder none"),
        (["--commits", "0"], "--commits"),
        (["--seed", "-1"], "--seed"),
    ],
)
def test_wrong_arguments_are_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.setattr("diloco_cli.simulate_plot.find_spec", lambda name: object())
    assert main(["simulate", str(write(tmp_path)), *arguments]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and shown.out == "" and "Traceback" not in shown.err


def test_without_matplotlib_a_plot_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco_cli.simulate_plot.find_spec", lambda name: None)
    assert main(["simulate", str(write(tmp_path)), "--plot", str(tmp_path / "x.png")]) == 2
    said = capsys.readouterr()
    assert said.err == "error: --plot needs matplotlib; install it with: pip install 'diloco[plot]'\n" and not said.out


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    place = tmp_path / "x.png"
    assert main(["simulate", str(write(tmp_path)), "--commits", "60", "--plot", str(place)]) == 0
    assert place.read_bytes().startswith(b"\x89PNG") and place.stat().st_size > 10_000


def test_it_needs_neither_torch_nor_matplotlib(tmp_path: Path) -> None:
    code = (
        "import sys; from diloco_cli.__main__ import main; "
        f"code = main(['simulate', {str(write(tmp_path))!r}, '--commits', '5', '--json']); "
        "sys.exit(code or 10 * ('torch' in sys.modules) or 20 * ('matplotlib' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=50)
    assert done.returncode == 0


def test_a_report_of_a_thousand_steps_says_how_much_was_simulated(tmp_path: Path) -> None:
    report = simulate(spec(tmp_path, tokens=400_000_000), seed=0, commits=300)
    assert report.outcome.simulated_commits <= 300 and report.outcome.skipped_seconds > 0.0
    assert report.result.eta_seconds == pytest.approx(400_000_000 / report.result.tokens_per_second, rel=0.01)
