"""The records of the blackboard: small JSON objects, frozen, each with schema version, run id and nonce.

Pure: no I/O, no clock. All in one module, longer than others, because it is the schema of everything that is stored.
Token counts are integers. A *token-parameter* is one token seen by one parameter: a commit of fragment f credits
`tokens * parameters(f)` of them, so that a token counts once when every fragment has it, exactly.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from diloco_runtime.errors import CorruptObject

SCHEMA_VERSION: Final = 1


class Part(BaseModel):
    """A part of a record. Unknown keys are refused: a newer writer must raise the schema version."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Record(Part):
    """What every record carries."""

    schema_version: Literal[1] = SCHEMA_VERSION
    run_id: str
    nonce: str
    """Unique to one attempt to write one object; read back to tell a won create from a lost one."""


class RunRecord(Record):
    """`run.json`: which run this folder holds. Created once, deleted first by a purge."""

    name: str
    code_version: str
    config: dict[str, Any]
    """The resolved `RunConfig` as JSON."""
    created_wall: float
    """Seconds since 1970 on the creator's clock; for display only."""


class Shard(Part):
    """One object of a payload that is cut into several."""

    size: int = Field(ge=1)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class PayloadRef(Part):
    """Points at payload bytes: found through a record, never by listing."""

    key: str
    size: int = Field(ge=1)
    sha256: str
    """Of the bytes; of a sharded payload: of its shards' hashes, as bytes, joined."""
    shards: tuple[Shard, ...] = ()
    """Empty: the payload is one object, at `key`. Else its objects in order; their keys are made from `key`."""


class Position(Part):
    """How far an island has read: samples `[0, offset)` of `unit` in `data_pass`, and its earlier units wholly."""

    data_pass: int = Field(0, ge=0)
    unit_index: int = Field(-1, ge=-1)
    """Place of the unit in the order in which the pass hands units out; -1: nothing claimed yet."""
    offset: int = Field(0, ge=0)

    def order(self) -> tuple[int, int, int]:
        """Sort key: later positions are greater."""
        return (self.data_pass, self.unit_index, self.offset)


class Fates(Part):
    """What became of the tokens that one learner life processed on one fragment, counted since its start.

    `processed = merged + refused + late + overwritten + offered + fresh` at every moment; when a life is over, what is
    still `offered` (and never recorded) or `fresh` is lost.
    """

    processed: int = 0
    merged: int = 0
    refused: int = 0
    late: int = 0
    overwritten: int = 0
    offered: int = 0
    """In offers without a commit yet."""
    fresh: int = 0
    """Not offered yet."""


class TensorPiece(Part):
    """Rows `[start, stop)` of a named tensor (`start = 0`, `stop = shape[0]`, or 0 and 1 for scalars)."""

    name: str
    shape: tuple[int, ...]
    """Shape of the piece itself."""
    start: int
    stop: int
    merge: Literal["rda", "mean"]

    @property
    def key(self) -> str:
        """Name of the piece inside a payload."""
        return f"{self.name}[{self.start}:{self.stop}]"

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


class Fragment(Part):
    """A fixed subset of the parameters, synchronised together."""

    pieces: tuple[TensorPiece, ...]

    @property
    def numel(self) -> int:
        return sum(piece.numel for piece in self.pieces)


class OfferEntry(Part):
    """One offer as a commit names it."""

    island: str
    incarnation: int
    nonce: str
    anchor: int
    inner_steps: int
    tokens: int
    weight: float = 0.0
    """Share in the merge, all merged offers together 1; 0 when refused."""
    reason: str = ""
    """Why it was refused; empty when merged."""
    data_to: Position
    """The offering island's data position when the offer was made."""
    payload: PayloadRef | None = None


class CommitRecord(Record):
    """`log/<seq>.json`: one outer step on one fragment, or the initialisation (`seq` 0). The run's only history."""

    seq: int = Field(ge=0)
    parent: str
    """Nonce of `log/<seq - 1>`; empty for `seq` 0."""
    fragment: int
    """-1 for the initialisation."""
    author: str
    """Island whose syncer wrote it."""
    author_incarnation: int
    successor: str
    """Island whose syncer is to write the next commit."""
    phase: Literal["run", "drain", "final"] = "run"
    drain_left: int = 0
    """Final merges still to come after this commit (P in the commit that starts the drain, 0 in the final one)."""
    control: int = 0
    """Newest control record that this commit knows of."""
    reason: str = ""
    """Why the run drains: "budget" or the reason of a stop request."""
    budget: int = 0
    """Tokens that the run is to merge, as known to this commit (a control record may have raised the configured
    ones)."""
    merged: tuple[OfferEntry, ...] = ()
    refused: tuple[OfferEntry, ...] = ()
    credited: int = 0
    """Token-parameters credited by this commit."""
    credited_total: int = 0
    """Token-parameters credited so far; tokens = this / parameters of the model."""
    positions: dict[str, Position] = Field(default_factory=dict)
    """Per island, the data position of its newest offer in this or any earlier commit: where a restart goes on."""
    params: tuple[PayloadRef, ...]
    """New fp32 parameters of the fragment; of every fragment in order for the initialisation."""
    momentum: PayloadRef | None = None
    """New outer momentum buffer of the fragment, fp32; None: zeros."""
    fragments: tuple[Fragment, ...] = ()
    """The fragment table; only in the initialisation."""
    data: str = ""
    """Fingerprint of the task's data; only in the initialisation, empty when the task gives none."""
    stages: dict[str, float] = Field(default_factory=dict)
    """Seconds that the author spent per stage (wait, fetch, merge, write) on its own clock; the sum: commit time."""


class CallRecord(Record):
    """`calls/<seq>.json`: merge `seq` is to happen now. Created by the first learner for whom it is due."""

    seq: int
    island: str
    incarnation: int


class OfferRecord(Record):
    """`offers/<seq>/<island>-<incarnation>.json`: a delta for merge `seq`. Created after its payload is complete."""

    seq: int
    fragment: int
    island: str
    incarnation: int
    anchor: int
    inner_steps: int = Field(ge=1)
    tokens: int = Field(ge=0)
    codec: Literal["fp32", "bf16"]
    payload: PayloadRef
    data_from: Position
    data_to: Position
    fates: tuple[Fates, ...]
    """One per fragment, as of this offer (which is counted under `offered`)."""


class ClaimRecord(Record):
    """`islands/<island>/<incarnation>/claim.json`: a start of a learner says who the island is now."""

    island: str
    incarnation: int
    agent: str
    """Nonce of the agent's own life: learner lives under one agent follow each other, a foreign agent fences."""
    host: str
    pid: int
    started: float
    """Start time of the agent process as the operating system gives it (with pid: who this process is)."""
    claimed_wall: float
    resumed_from: str = ""
    """Which checkpoint or log position this life starts from, for people."""


class LearnerStatus(Part):
    """What a learner says of itself; written to a local file at every step, carried by the heartbeat."""

    state: Literal["starting", "training", "waiting", "draining", "finished", "failed"] = "starting"
    ticks: int = 0
    """Grows whenever the learner's main loop turns, also while it waits on purpose."""
    step: int = 0
    adopted: int = -1
    """Log position up to which this learner has adopted everything."""
    loss: float | None = None
    lr: float | None = None
    progress: float = 0.0
    step_seconds: float | None = None
    """Moving average of one inner step."""
    busy_seconds: float = 0.0
    """Time spent in inner steps, this life."""
    longest_gap: float = 0.0
    """Longest time between the ends of two consecutive inner steps, this life."""
    waited_seconds: float = 0.0
    """Time spent waiting on purpose (`overlap_steps`)."""
    in_flight: int = 1
    skipped_steps: int = 0
    """Inner steps undone because loss or gradient was not finite."""
    reset_fragments: int = 0
    """Times that a fragment was not finite and was set back to its anchor instead of offered."""
    reread_samples: int = 0
    """Samples read again because no further unit could be claimed."""
    publish_seconds: float | None = None
    """Moving average of the time to encode and upload one offer."""
    bandwidth: float = 0.0
    """Payload bytes per second that this island moves to and from the store; 0 while unmeasured."""
    position: Position = Position()
    checkpoint: int = 0
    """Newest complete checkpoint of this life."""
    fates: tuple[Fates, ...] = ()
    bytes_up: int = 0
    bytes_down: int = 0
    requests: int = 0
    problem: str = ""
    """What is wrong right now, in one sentence; empty when nothing is."""


class SyncerStatus(Part):
    """What a standby or active syncer says of itself."""

    progress: int = 0
    """Grows whenever the syncer's loop turns, also in vain."""
    duty: bool = False
    reopened: bool = False
    """The run had ended and goes on: a learner that left at the end is wanted again."""
    head: int = -1
    score: float = 0.0
    """Measured bandwidth to the store times spare CPU share, bytes per second; 0 while unmeasured."""
    commits: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    requests: int = 0
    problem: str = ""


class HeartbeatRecord(Record):
    """`islands/<island>/<incarnation>/heartbeat.json`: the only object that is overwritten, by one writer."""

    island: str
    incarnation: int
    agent: str
    counter: int
    state: Literal["starting", "running", "leaving", "stopped", "failed"]
    reason: str = ""
    learner: LearnerStatus
    syncer: SyncerStatus
    restarts: int = 0
    """Learner restarts by this agent."""
    uptime: float = 0.0
    """Seconds this agent has lived, on its own clock."""
    cpu_seconds: dict[str, float] = Field(default_factory=dict)
    """CPU time of agent, learner and syncer."""
    still: dict[str, float] = Field(default_factory=dict)
    """Seconds for which the main loops of learner and syncer have not turned, on the agent's clock."""
    host: str
    pid: int
    started: float
    launch: str = ""
    """Id of the launch by a supervisor that this agent came of; empty: started by hand."""


class CheckpointRecord(Record):
    """`.../checkpoints/<n>/checkpoint.json`: the marker, created after its payload."""

    island: str
    incarnation: int
    number: int
    log_position: int
    step: int
    progress: float
    position: Position
    payload: PayloadRef
    scalars: dict[str, float] = Field(default_factory=dict)


class UnitRecord(Record):
    """`data/<pass>/<unit>.json`: which island reads this unit in this pass. `unit` is the place in hand-out order."""

    data_pass: int
    unit_index: int
    island: str
    incarnation: int


class LaunchIntent(Part):
    """What a supervisor is about to launch for an island, written before it does."""

    island: str
    launches: int
    """How many times this supervisor chain has launched the island, this one included."""
    reason: str
    launch: str = ""
    """Id of this launch; its agent repeats it in its heartbeats."""


class SupervisorRecord(Record):
    """`supervisor/<n>.json`: who supervises, which islands the run has, what is about to be launched."""

    number: int
    supervisor: str
    """Nonce of the supervisor's life."""
    host: str
    pid: int
    started: float
    islands: tuple[str, ...]
    launching: tuple[LaunchIntent, ...] = ()
    given_up: tuple[str, ...] = ()
    """Islands that are not relaunched any more."""
    ended: bool = False
    """The supervisor left on purpose; anyone may follow at once."""


class SupervisorHeartbeat(Record):
    """Overwritten by the one supervisor that created `supervisor/<number>.json`."""

    number: int
    supervisor: str
    counter: int


class ControlRecord(Record):
    """`control/<n>.json`: a person's wish. `stop` drains the run; `run` (re)opens it, with a new budget if given."""

    number: int
    action: Literal["stop", "run"]
    tokens: int | None = None
    reason: str = ""


R = TypeVar("R", bound=Record)


def encode(record: Record) -> bytes:
    """Serialise a record to the bytes stored under its key."""
    return record.model_dump_json(exclude_defaults=False).encode() + b"\n"


def decode(kind: type[R], data: bytes, key: str) -> R:
    """Parse stored bytes; raise `CorruptObject` naming `key` when they are not a valid record of this kind."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole object"
        raise CorruptObject(f"{key} is not a valid {kind.__name__}: {where}: {first['msg']}") from error
