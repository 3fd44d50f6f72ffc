"""The global model at a log position: which payloads make it up, and reading them."""

from __future__ import annotations

import torch

from diloco_runtime.blackboard import Blackboard
from diloco_runtime.codec import decode_fragment
from diloco_runtime.errors import ConfigError, CorruptObject, MissingPayload
from diloco_runtime.fragments import assemble
from diloco_runtime.history import params_ref, read_table, read_version, read_version_any
from diloco_runtime.keys import version_at
from diloco_runtime.records import CommitRecord, Fragment

READ_ATTEMPTS = 8
"""How often a reader of the newest state starts again because the run moved on and collected what it was reading."""


def fetch_params(
    board: Blackboard, commit: CommitRecord, fragment: int, table: tuple[Fragment, ...]
) -> dict[str, torch.Tensor]:
    """Return the parameters of a fragment as a commit left them: fp32 by piece key."""
    ref = params_ref(commit, fragment)
    return decode_fragment(board.get_payload(ref), table[fragment], "fp32", ref.key)


def load_state(board: Blackboard, seq: int | None = None) -> tuple[CommitRecord, dict[str, torch.Tensor]]:
    """Return the commit at a log position (None: the newest) and the global parameters there, fp32 by clean name.

    Raises `ConfigError` when the run has no such position yet, `MissingPayload` when the position is not retained.
    """
    for attempt in range(READ_ATTEMPTS):
        head = board.head()
        if head is None:
            raise ConfigError(f"{board.store.url} has no model yet: no island has initialised the run")
        if seq is not None and seq > head.seq:
            raise ConfigError(f"log position {seq} does not exist yet; the newest is {head.seq}")
        commit = head if seq is None else read_version_any(board, seq)
        try:
            return commit, _read_position(board, commit)
        except MissingPayload as error:
            if seq is not None:
                raise MissingPayload(
                    f"the parameters at log position {seq} are no longer kept ({error}); newest is {head.seq}, and "
                    "positions that are multiples of sync.snapshot_every stay"
                ) from error
            if attempt == READ_ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


def _read_position(board: Blackboard, commit: CommitRecord) -> dict[str, torch.Tensor]:
    table = read_table(board)
    if table is None:
        raise CorruptObject(f"{board.keys.log(0)} is missing from the log")
    pieces = {}
    for fragment in range(len(table)):
        version = version_at(fragment, commit.seq, len(table))
        pieces[fragment] = fetch_params(board, read_version(board, fragment, version), fragment, table)
    return assemble(table, pieces)
