"""The bugs of `make mutants` still fit the source; whether exploring finds them takes minutes and is seen there."""

from __future__ import annotations

import ast

import pytest

from tests.sim.mutants import MUTANTS, ROOT, Mutant, changed


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_place_of_a_mutant_is_there_and_the_bug_can_be_compiled(mutant: Mutant) -> None:
    for file, text in changed(mutant, ROOT).items():
        assert text != (ROOT / file).read_text()
        ast.parse(text)
