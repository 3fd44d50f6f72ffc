"""Shipped files are found in a checkout (for an installed wheel see tests/packaging)."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco_cli.resources import find

ROOT = Path(__file__).resolve().parents[2]


def test_a_checkout_has_them_at_its_root() -> None:
    assert find("templates") == ROOT / "templates"
    assert find("runtime/pyproject.toml") == ROOT / "runtime" / "pyproject.toml"


def test_a_missing_file_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"templates/none\.toml is missing from this installation"):
        find("templates/none.toml")
