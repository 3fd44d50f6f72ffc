"""Reading the run's history: which commit made which version, and where it keeps what. No tensors here."""

from __future__ import annotations

from diloco_runtime.blackboard import Blackboard
from diloco_runtime.errors import CorruptObject
from diloco_runtime.records import CommitRecord, Fragment, PayloadRef


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


def read_version_any(board: Blackboard, seq: int) -> CommitRecord:
    """Return commit `seq`, whatever it merges; raise `CorruptObject` when it is missing."""
    commit = board.read_commit(seq)
    if commit is None:
        raise CorruptObject(f"{board.keys.log(seq)} is missing from the log")
    return commit
