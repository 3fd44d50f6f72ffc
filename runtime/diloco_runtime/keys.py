"""Every object key of a run: built here, padded here, never parsed into a path.

All keys are relative to the run's folder `<store>/<name>/`. Everything except `run.json` lies below the run id, so that
a process left over from a purged run of the same name cannot occupy a name that the new run needs (create-once names
would otherwise be blocked for ever by one late write).
"""

from __future__ import annotations

import re

RUN = "run.json"
_ISLAND = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_RUN_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_HEX = re.compile(r"[0-9a-f]{8,32}")


def is_island_name(name: str) -> bool:
    """Tell whether `name` can name an island: a valid path segment, cluster-name part and environment value."""
    return _ISLAND.fullmatch(name) is not None


def is_run_name(name: str) -> bool:
    """Tell whether `name` can name a run: also the prefix of cluster names and the folder on the blackboard."""
    return _RUN_NAME.fullmatch(name) is not None


class Keys:
    """Builds the keys of one run from its run id."""

    def __init__(self, run_id: str) -> None:
        if _HEX.fullmatch(run_id) is None:
            raise ValueError(f"run id {run_id!r} is not 8 to 32 hex digits")
        self.root = run_id

    def logs(self) -> str:
        return f"{self.root}/log/"

    def log(self, seq: int) -> str:
        return f"{self.root}/log/{seq:012d}.json"

    def call(self, seq: int) -> str:
        return f"{self.root}/calls/{seq:012d}.json"

    def offers(self, seq: int) -> str:
        """Prefix of all offers to merge `seq` (ends in a slash)."""
        return f"{self.root}/offers/{seq:012d}/"

    def offer(self, seq: int, island: str, incarnation: int) -> str:
        return f"{self.offers(seq)}{island}-{incarnation:06d}.json"

    def blobs(self, seq: int) -> str:
        """Prefix of every payload written for merge `seq` (ends in a slash): what garbage collection lists."""
        return f"{self.root}/blobs/{seq:012d}/"

    def blob(self, seq: int, kind: str, fragment: int, nonce: str) -> str:
        """Key of a payload; `kind` is "params", "momentum" or "delta"."""
        return f"{self.blobs(seq)}{kind}-{fragment:04d}-{nonce}.safetensors"

    def islands(self) -> str:
        return f"{self.root}/islands/"

    def life(self, island: str, incarnation: int) -> str:
        return f"{self.root}/islands/{island}/{incarnation:06d}/"

    def claim(self, island: str, incarnation: int) -> str:
        return f"{self.life(island, incarnation)}claim.json"

    def heartbeat(self, island: str, incarnation: int) -> str:
        return f"{self.life(island, incarnation)}heartbeat.json"

    def checkpoints(self, island: str, incarnation: int) -> str:
        return f"{self.life(island, incarnation)}checkpoints/"

    def checkpoint(self, island: str, incarnation: int, number: int, name: str) -> str:
        return f"{self.checkpoints(island, incarnation)}{number:06d}/{name}"

    def unit(self, data_pass: int, unit: int) -> str:
        return f"{self.root}/data/{data_pass:06d}/{unit:08d}.json"

    def supervisor(self, number: int) -> str:
        return f"{self.root}/supervisor/{number:06d}.json"

    def supervisor_heartbeat(self, number: int) -> str:
        return f"{self.root}/supervisor/{number:06d}-heartbeat.json"

    def control(self, number: int) -> str:
        return f"{self.root}/control/{number:06d}.json"

    def metrics(self, island: str, incarnation: int, number: int) -> str:
        return f"{self.root}/metrics/{island}/{incarnation:06d}/{number:08d}.jsonl"


def version_before(seq: int, fragments: int) -> int:
    """Return the version at which offers to merge `seq` are anchored: `seq - P`, or 0 for the first P merges."""
    return max(0, seq - fragments)


def fragment_of(seq: int, fragments: int) -> int:
    """Return the fragment that commit `seq >= 1` merges: `(seq - 1) mod P`."""
    return (seq - 1) % fragments


def version_at(fragment: int, head: int, fragments: int) -> int:
    """Return the version of `fragment` at log position `head`: its newest commit at or below it, or 0."""
    if head < fragment + 1:
        return 0
    return head - (head - 1 - fragment) % fragments
