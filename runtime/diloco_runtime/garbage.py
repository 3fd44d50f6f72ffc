"""Which payloads may go after a commit, and deleting them: a bounded amount of work however long the history.

Kept: everything of the newest `keep_versions` versions of each fragment, and the parameters at pinned positions
(multiples of `snapshot_every`, and the initialisation). Log and offer records stay: they are the audit.
"""

from __future__ import annotations

from diloco_runtime.blackboard import Blackboard
from diloco_runtime.payloads import object_keys
from diloco_runtime.records import CommitRecord


def is_pinned(version: int, fragments: int, snapshot_every: int) -> bool:
    """Tell whether the parameters of a version belong to a position that is kept for ever.

    Version v of its fragment is current at positions v .. v + P - 1; it is pinned when one of them is a multiple of
    `snapshot_every`.
    """
    next_snapshot = -(-version // snapshot_every) * snapshot_every
    return version == 0 or next_snapshot - version < fragments


def collectable(head: int, fragments: int, keep_versions: int) -> list[int]:
    """Return the seqs whose payloads become garbage with commit `head`: the one that has just left the window, and one
    swept before, for what a frozen or killed process wrote or left there since."""
    window = keep_versions * fragments
    return [seq for seq in (head - window, head - 2 * window) if seq >= 1]


def collect(board: Blackboard, head: CommitRecord, fragments: int, keep_versions: int, snapshot_every: int) -> int:
    """Delete the garbage of one commit; return how many objects went.

    Never touches a seq that is not wholly behind `keep_versions` newer versions of its fragment.
    """
    deleted = 0
    for seq in collectable(head.seq, fragments, keep_versions):
        commit = board.read_commit(seq)
        kept = set()
        if commit is not None and is_pinned(seq, fragments, snapshot_every):
            kept = {key for ref in commit.params for key in object_keys(ref)}
        for key in board.store.list(board.keys.blobs(seq)):
            if key not in kept:
                board.store.delete(key)
                deleted += 1
        board.store.delete(board.keys.call(seq))
    return deleted
