"""Small valid settings, fragment tables and commits, each field changeable."""

from __future__ import annotations

from typing import Any

from diloco_runtime.config import RunConfig
from diloco_runtime.records import CommitRecord, Fragment, OfferEntry, PayloadRef, Position, TensorPiece

RUN_ID = "0123456789abcdef"
PAYLOAD = PayloadRef(key=f"{RUN_ID}/blobs/x", size=1, sha256="00")


def table(*sizes: int) -> tuple[Fragment, ...]:
    """Return fragments of one vector each: `w0`, `w1` and so on."""
    return tuple(
        Fragment(pieces=(TensorPiece(name=f"w{i}", shape=(n,), start=0, stop=n, merge="rda"),))
        for i, n in enumerate(sizes)
    )


def config(tokens: int = 1000, **sync: Any) -> RunConfig:
    return RunConfig.model_validate({"name": "trial", "tokens": tokens, "model": {"kind": "a:b"}, "sync": sync})


def entry(nonce: str, island: str = "iowa", **fields: Any) -> OfferEntry:
    usual = {"incarnation": 1, "anchor": 0, "inner_steps": 1, "tokens": 1, "data_to": Position()}
    return OfferEntry.model_validate({"island": island, "nonce": nonce, **usual, **fields})


def commit(seq: int, fragments: int, **fields: Any) -> CommitRecord:
    usual = {
        "run_id": RUN_ID,
        "nonce": f"c{seq}",
        "parent": f"c{seq - 1}" if seq else "",
        "fragment": (seq - 1) % fragments if seq else -1,
        "author": "iowa",
        "author_incarnation": 1,
        "successor": "iowa",
        "budget": 1000,
        "params": (PAYLOAD,),
    }
    return CommitRecord.model_validate({"seq": seq, **usual, **fields})
