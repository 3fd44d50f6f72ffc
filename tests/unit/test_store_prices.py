"""Which service a store's URL names, and what a forecast makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco_cli.simulate_case import forecast, make_case
from diloco_cli.simulation.forecast import Window
from diloco_cli.spec import load_spec
from diloco_cli.store_prices import egress, request_prices


@pytest.mark.parametrize(
    ("url", "prices", "leaving"),
    [
        ("file:///srv/bb", (0.0, 0.0), "none"),
        ("s3://bucket/a", (5.0, 0.4), "of AWS"),
        ("s3://bucket/a?region=eu-west-1", (5.0, 0.4), "of AWS"),
        ("gs://bucket/a", (5.0, 0.4), "of Google"),
        ("s3://bucket?endpoint=https://x.r2.cloudflarestorage.com", (4.5, 0.36), "0 $/GB"),
        ("s3://bucket?endpoint=https://example.org", (5.0, 0.4), "unknown here"),
        ("gs://bucket?endpoint=http://127.0.0.1:4443", (5.0, 0.4), "unknown here"),
    ],
)
def test_prices_are_those_of_the_service(url: str, prices: tuple[float, float], leaving: str) -> None:
    assert request_prices(url) == prices and leaving in egress(url)


@pytest.mark.parametrize(
    ("store", "written", "writes", "reads"),
    [
        ("file://./bb", "", 0.0, 0.0),
        ("s3://bucket", "", 5.0, 0.4),
        ("s3://bucket", "price_per_million_writes = 0\nprice_per_million_reads = 2.0", 0.0, 2.0),
    ],
)
def test_a_forecast_takes_them_unless_the_spec_says_others(
    tmp_path: Path, store: str, written: str, writes: float, reads: float
) -> None:
    path = tmp_path / "s.toml"
    path.write_text(
        f'[run]\nname = "demo"\nstore = "{store}"\ntokens = 4000000\n[data]\nfiles = ["a.txt"]\n'
        "[model]\nlayers = 1\nheads = 1\nwidth = 64\n[sync]\nheartbeat_every = 5\n"
        f"[simulate]\nmtbf_hours = 0\n{written}\n[islands.a]\n[islands.b]\n"
    )
    spec = load_spec(path)
    _, found = forecast(spec, make_case(spec, 0), Window(steps=300))
    per_second = (writes * found.writes_per_second + reads * found.reads_per_second) / 1e6
    assert found.requests_per_day == pytest.approx(86_400 * per_second)
