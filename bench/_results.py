"""What the benches share in speaking: their arguments, tables for people, one JSON line per result for programs."""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

import diloco_runtime

Cell = str | int | float | None


def parse_arguments(description: str) -> argparse.Namespace:
    """Return the arguments that every bench takes: `quick` (bool) and `json` (path or None)."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: shows that it works, proves less")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the JSON lines to this file as well")
    return parser.parse_args()


def machine() -> dict[str, Cell]:
    """Return what the numbers depend on: CPU model, usable cores, load before the start, versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": models[0] if models else "unknown",
        "cores": cores,
        "load": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "diloco": diloco_runtime.__version__,
    }


def print_table(title: str, headers: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    """Print a table: first column to the left, the others to the right, floats with three significant digits."""
    texts = [list(headers), *([_text(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in texts) for column in range(len(headers))]
    print(f"\n{title}")
    for row in texts:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        print("  " + "  ".join(cells).rstrip())


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.3g}" if abs(cell) < 1000 else f"{cell:,.0f}"
    return f"{cell:,}" if isinstance(cell, int) else cell


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return lower quartile, median and upper quartile of two or more values."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


class Lines:
    """JSON lines of one bench: kept while it measures, printed at its end, below the tables."""

    def __init__(self, bench: str, arguments: argparse.Namespace) -> None:
        self._common = {"bench": bench, "quick": arguments.quick, **machine()}
        self._file: Path | None = arguments.json
        self._lines: list[str] = []

    def add(self, result: str, **values: object) -> None:
        """Add one result."""
        self._lines.append(json.dumps({**self._common, "result": result, **values}))

    def finish(self) -> None:
        """Print all lines, and append them to the file that was asked for."""
        print()
        for line in self._lines:
            print(line)
        if self._file is not None:
            with self._file.open("a") as file:
                file.writelines(f"{line}\n" for line in self._lines)
