"""The global model at a log position: which payloads make it up, and reading them."""

from __future__ import annotations

import torch

from diloco_runtime.blackboard import Blackboard
from diloco_runtime.codec import decode_fragment
from diloco_runtime.errors import ConfigError, CorruptObject, MissingPayload
from diloco_runtime.fragments import assemble
from diloco_runtime.keys import version_at
from diloco_runtime.records import CommitRecord, Fragment, PayloadRef

READ_ATTEMPTS = 8
"""How often a reader of the newest state starts again because the run moved on and collected what it was reading."""


def read_table(board: Blackboard) -> tuple[Fragment, ...] | None:
    """Return the run's fragment table from `log/0`, or None when no island has initialised the run yet."""
    first = board.read_commit(0)
    return None if first is None else first.fragments


def params_ref(commit: CommitRecord, fragment: int) -> PayloadRef:
    """Return where a commit (or the initialisation) keeps the parameters of a fragment."""
    return commit.params[fragment] if commit.seq == 0 else commit.params[0]


def read_version(board: Blackboard, fragment: int, version: int) -> CommitRecord:
    """Return the commit that made `version` of `fragment`; raise `CorruptObject` when the log has a hole there."""
    commit = board.read_commit(version)
    if commit is None:
        raise CorruptObject(f"{board.keys.log(version)} is missing from the log")
    if version > 0 and commit.fragment != fragment:
        raise CorruptObject(f"{board.keys.log(version)} merges fragment {commit.fragment}, not {fragment}")
    return commit


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


def read_version_any(board: Blackboard, seq: int) -> CommitRecord:
    """Return commit `seq`, whatever it merges; raise `CorruptObject` when it is missing."""
    commit = board.read_commit(seq)
    if commit is None:
        raise CorruptObject(f"{board.keys.log(seq)} is missing from the log")
    return commit


def _read_position(board: Blackboard, commit: CommitRecord) -> dict[str, torch.Tensor]:
    table = read_table(board)
    if table is None:
        raise CorruptObject(f"{board.keys.log(0)} is missing from the log")
    pieces = {}
    for fragment in range(len(table)):
        version = version_at(fragment, commit.seq, len(table))
        pieces[fragment] = fetch_params(board, read_version(board, fragment, version), fragment, table)
    return assemble(table, pieces)
