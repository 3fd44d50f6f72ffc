"""Remove a run from its store, in the order that keeps its leftovers harmless.

`run.json` goes first: from then on no process writes for this run (each looks at `run.json` before it writes), and a
new run of the same name can begin at once, since everything else lies below the old run id.
"""

from __future__ import annotations

from diloco_runtime.keys import RUN, Keys
from diloco_runtime.records import RunRecord, decode
from diloco_runtime.store import ObjectStore


def purge_run(store: ObjectStore, run_id: str) -> int:
    """Delete run `run_id` and return how many objects that took; go on where an earlier purge was interrupted.

    A `run.json` that names another run stays. Raises `CorruptObject` when it cannot be read as a run, and
    `StoreUnavailable` when the store fails: call again with the same run id.
    """
    root = Keys(run_id).root
    deleted = 0
    if _current_run(store) == run_id:
        store.delete(RUN)
        deleted = 1
    # A writer that looked at run.json just before may still be writing: its objects go with the next purge.
    return deleted + store.delete_tree(root + "/")


def leftover_runs(store: ObjectStore) -> list[str]:
    """Return the ids of runs that have objects here although `run.json` does not name them (interrupted purges)."""
    current = _current_run(store)
    return [name for name in store.list_folders("") if name != current and _is_run_id(name)]


def _is_run_id(name: str) -> bool:
    try:
        Keys(name)
    except ValueError:
        return False
    return True


def _current_run(store: ObjectStore) -> str | None:
    data = store.get(RUN)
    return None if data is None else decode(RunRecord, data, RUN).run_id
