"""A learner's logic without a learner: what its main loop does with it, step by step."""

from __future__ import annotations

from typing import Any

from diloco_runtime.learner_logic import LearnerLogic, Offer
from tests.support.run_records import commit, config, table


def learner(fragments: int = 3, head: int = 0, tokens: int = 1000, **sync: Any) -> LearnerLogic:
    """Return the logic of a learner with fragments of 10 numbers each, that has just adopted `head`."""
    settings = config(tokens, fragments=fragments, **sync)
    return LearnerLogic(settings, table(*[10] * fragments), commit(head, fragments, budget=tokens))


def steps(logic: LearnerLogic, count: int, tokens: int = 8) -> None:
    """Make inner steps and nothing else."""
    for _ in range(count):
        logic.on_step(tokens)


def make(logic: LearnerLogic, offers: list[Offer]) -> list[int]:
    """Make offers; return their seqs. The nonce of the offer to merge s is "n<s>"."""
    for offer in offers:
        logic.offered(offer, f"n{offer.seq}")
    return [offer.seq for offer in offers]


def turn(logic: LearnerLogic, early: float = 0.0) -> tuple[int | None, list[int]]:
    """Do what the learner does after an inner step: call what is due, offer what is wanted."""
    logic.on_step(8)
    seq = logic.call()
    if seq is not None:
        logic.on_called(seq)
    return seq, make(logic, logic.offers(early))
