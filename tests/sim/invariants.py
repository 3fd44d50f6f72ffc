"""What must hold after every event of a simulated run, whatever goes wrong.

`Watch` sits behind the bucket: it sees every effect (created, overwritten, deleted), in the order in which they happen
for everybody, and looks at the learners whenever the log grows. What it calls a violation is one in every run; it
knows nothing of the faults that are injected.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable

import safetensors.torch
import torch

from diloco_cli.simulation.machines import Machine
from diloco_cli.simulation.run import Simulation
from diloco_runtime.blackboard import IDENTITY_TRUSTED_SECONDS
from diloco_runtime.keys import RUN, fragment_of, version_before
from diloco_runtime.learner import Learner
from diloco_runtime.life import Engine
from diloco_runtime.records import ClaimRecord, CommitRecord, HeartbeatRecord, LearnerStatus, OfferRecord

OVERWRITTEN = re.compile(r"(supervisor/\d+-|/)heartbeat\.json$")
"""The only names that may ever hold two different contents."""

HEARTBEAT = re.compile(r"/islands/.*/heartbeat\.json$")
RECORDS = re.compile(r"^[0-9a-f]+/(log|offers|calls|islands|supervisor|control|data)/.*\.json$|^run\.json$")
NEVER_DELETED = re.compile(r"^[0-9a-f]+/(log|offers|supervisor|control|data)/|/claim\.json$|^run\.json$")


FENCE_PERIODS = 14.0
"""Heartbeat periods for which a life that was replaced may still have one operation on its way: frozen (4.5 at most),
then lost, then late, and that on a slow uplink."""

PURGE_SECONDS = IDENTITY_TRUSTED_SECONDS
"""A purged run may be written to for this long by who looked before, and as long as a fenced life may write, and as
long as the longest upload took: what was sent before the purge arrives after it."""

HUNG_PERIODS = 4.0
"""Heartbeat periods after which everybody must have noticed that a syncer hangs, beyond the two for each of
`dead_after_reads`: standbys look every other period."""

STAIRS = 0.2
"""Least share of looks at a learner between two commits at which its learning rate must have moved on."""

KILLED_STILL = re.compile(r"island (\S+): killed, no progress")


class Watch:
    """Follows one simulation; `violations` stays empty while all is well."""

    def __init__(self, simulation: Simulation, tell: Callable[[str], None] = lambda _: None) -> None:
        self.violations: list[str] = []
        self.log: list[CommitRecord] = []
        self.states: set[str] = set()
        """Digests of what the run as a whole was like when its log grew."""
        self._simulation = simulation
        self._tell = tell
        self._offers: dict[str, OfferRecord] = {}
        self._offer_keys: dict[str, str] = {}
        self._merged: set[str] = set()
        self._claims: dict[str, int] = {}
        self._claimed_at: dict[tuple[str, int], float] = {}
        self._versions: dict[int, dict[int, dict[str, torch.Tensor]]] = {}
        """Per fragment the values of its versions, as committed."""
        self._lives: list[tuple[Machine, int, Engine]] = []
        self._progress: dict[int, float] = {}
        self._heard: dict[tuple[str, int], LearnerStatus] = {}
        self._stairs = [0, 0]
        """How often a learner made steps between two commits, and how often its progress moved meanwhile."""
        self.disturbed: dict[str, float] = {}
        """Until when an island has an excuse for standing still."""
        self._said = 0
        self.purged_at: float | None = None
        self._credits: dict[tuple[str, int, int], list[tuple[int, int]]] = {}
        """Per island, incarnation and fragment: (seq, tokens) of what the log merged."""
        self._parse = simulation.memory.parse
        self._beat = simulation.config.sync.heartbeat_every
        self._root = simulation.observer().keys.root
        simulation.bucket.watchers.append(self._on_effect)

    def born(self, machine: Machine, incarnation: int, engine: Engine) -> None:
        """A learner life begins."""
        self._lives.append((machine, incarnation, engine))

    def _broken(self, what: str) -> None:
        self.violations.append(f"at {self._simulation.world.now:.3f}: {what}")
        self._simulation.world.stop()

    # ---- effects ----------------------------------------------------------------------------------------------------

    def _on_effect(self, verb: str, key: str, before: bytes | None, after: bytes | None) -> None:
        self._tell(f"{verb} {key} {hashlib.sha256(after or b'').hexdigest()[:12]}")
        if self.purged_at is not None:
            self._on_effect_after_purge(key, after)
        elif after is None:
            self._on_delete(key)
        elif HEARTBEAT.search(key):
            self._on_heartbeat(self._parse(HeartbeatRecord, after, key))
        elif before is not None:
            if before != after and not OVERWRITTEN.search(key):
                self._broken(f"{key} was overwritten with something else")
        elif verb == "put" and RECORDS.search(key) and not OVERWRITTEN.search(key):
            self._broken(f"{key} was written without a condition")
        elif key.startswith(f"{self._root}/log/"):
            self._on_commit(key, self._parse(CommitRecord, after, key))
        elif key.startswith(f"{self._root}/offers/"):
            self._on_offer(key, self._parse(OfferRecord, after, key))
        elif key.endswith("/claim.json"):
            self._on_claim(key, self._parse(ClaimRecord, after, key))

    def _on_effect_after_purge(self, key: str, after: bytes | None) -> None:
        """A run that was purged stays purged: whoever has not heard of it yet hears of it at a write."""
        late = self._simulation.world.now - self.purged_at if self.purged_at is not None else 0.0
        upload = max(machine.link.up.longest for machine in self._simulation.machines.values())
        if after is not None and late > PURGE_SECONDS + FENCE_PERIODS * self._beat + upload:
            self._broken(f"{key} was written {late:.1f} s after the run was purged")

    def _on_delete(self, key: str) -> None:
        if key == RUN:
            self.purged_at = self._simulation.world.now
            return
        if NEVER_DELETED.search(key):
            self._broken(f"{key} was deleted")
        if not self.log or f"{self._root}/blobs/" not in key:
            return
        count, keep = len(self.log[0].fragments), self._simulation.config.sync.keep_versions
        for commit in self.log[-keep * count :]:
            if any(ref.key == key for ref in commit.params):
                self._broken(f"{key} was deleted although {commit.seq} is one of the newest {keep} versions")
            if commit.momentum is not None and commit.momentum.key == key and commit.seq > self.log[-1].seq - count:
                self._broken(f"{key}, the newest momentum of its fragment, was deleted")

    def _on_claim(self, key: str, claim: ClaimRecord) -> None:
        if claim.incarnation != self._claims.get(claim.island, 0) + 1:
            self._broken(f"{key}: life {claim.incarnation} follows {self._claims.get(claim.island, 0)}")
        self._claims[claim.island] = claim.incarnation
        self._claimed_at[claim.island, claim.incarnation] = self._simulation.world.now

    def _on_offer(self, key: str, offer: OfferRecord) -> None:
        if offer.nonce in self._offers:
            self._broken(f"{key} repeats the nonce of another offer")
        if offer.payload.key not in self._simulation.bucket.objects and offer.seq > len(self.log) - 1:
            self._broken(f"{key} was written before its payload")
        if offer.incarnation > self._claims.get(offer.island, 0):
            self._broken(f"{key} is of a life that was never claimed")
        replaced = self._claimed_at.get((offer.island, offer.incarnation + 1))
        if replaced is not None and self._simulation.world.now - replaced > FENCE_PERIODS * self._beat:
            self._broken(f"{key} comes {self._simulation.world.now - replaced:.1f} s after that life was replaced")
        self._offers[offer.nonce], self._offer_keys[offer.nonce] = offer, key
        if self.log and offer.anchor != version_before(offer.seq, len(self.log[0].fragments)):
            self._broken(f"{key} is anchored at {offer.anchor}")

    # ---- the log ----------------------------------------------------------------------------------------------------

    def _on_commit(self, key: str, commit: CommitRecord) -> None:
        seq = len(self.log)
        if commit.seq != seq or key != self._simulation.observer().keys.log(seq):
            self._broken(f"{key} does not follow commit {seq - 1}")
            return
        parent = self.log[-1].nonce if self.log else ""
        if commit.parent != parent:
            self._broken(f"commit {seq} was built on another parent")
        self.log.append(commit)
        if any(ref.key not in self._simulation.bucket.objects for ref in commit.params):
            self._broken(f"commit {seq} was written before its payload")
            return
        if seq:
            self._check_entries(commit)
            self._check_phase(self.log[-2], commit)
            self._check_successor(commit)
        self._keep_versions(commit)
        self._look_at_learners()
        self._note_state(commit)

    def _check_entries(self, commit: CommitRecord) -> None:
        count = len(self.log[0].fragments)
        if commit.fragment != fragment_of(commit.seq, count):
            self._broken(f"commit {commit.seq} merges fragment {commit.fragment}")
        for entry in (*commit.merged, *commit.refused):
            offer = self._offers.get(entry.nonce)
            if offer is None or offer.seq != commit.seq:
                self._broken(f"commit {commit.seq} judges offer {entry.nonce} that was not made to it")
                continue
            if entry.nonce in self._merged:
                self._broken(f"commit {commit.seq} judges offer {entry.nonce} again")
            self._merged.add(entry.nonce)
            if not entry.reason:
                life = (entry.island, entry.incarnation, commit.fragment)
                self._credits.setdefault(life, []).append((commit.seq, entry.tokens))
            if not entry.reason and offer.payload.key not in self._simulation.bucket.objects:
                self._broken(f"commit {commit.seq} merges {entry.nonce}, whose payload is gone")
            if not entry.reason and entry.anchor != version_before(commit.seq, count):
                self._broken(f"commit {commit.seq} merges an offer anchored at {entry.anchor}")
        total = self.log[-2].credited_total + commit.credited
        if commit.credited_total != total:
            self._broken(f"commit {commit.seq} counts {commit.credited_total} credited tokens, not {total}")

    def _check_phase(self, before: CommitRecord, commit: CommitRecord) -> None:
        """A run ends with one last merge of every fragment, for what is on its way; only then is it final."""
        count = len(self.log[0].fragments)
        if before.phase == "drain":
            left = before.drain_left - 1
            expected = [("drain", left)] if left > 0 else [("final", 0)]
        else:
            expected = [("run", 0), ("drain", count)]
        if (commit.phase, commit.drain_left) not in expected:
            self._broken(f"commit {commit.seq} is {commit.phase}, {commit.drain_left} left, after {before.phase}")

    def _check_successor(self, commit: CommitRecord) -> None:
        """The duty is handed to nobody whose syncer hangs, for longer than it takes to notice that."""
        machine = self._simulation.machines.get(commit.successor)
        syncer = machine.processes().get("syncer") if machine is not None else None
        if commit.successor == commit.author or syncer is None or not syncer.frozen:
            return
        author = self._simulation.machines[commit.author]
        now = self._simulation.world.now
        unwell = min(now, author.link.unwell_until)
        hung = now - max(unwell, syncer.frozen_since, *(p.running_since for p in author.processes().values()))
        if hung > self._beat * (HUNG_PERIODS + 2 * self._simulation.config.sync.dead_after_reads):
            self._broken(f"commit {commit.seq} names {commit.successor} next, whose syncer hangs for {hung:.1f} s")

    def _keep_versions(self, commit: CommitRecord) -> None:
        fragments = range(len(self.log[0].fragments)) if commit.seq == 0 else (commit.fragment,)
        for fragment in fragments:
            ref = commit.params[fragment if commit.seq == 0 else 0]
            values = safetensors.torch.load(self._simulation.bucket.objects[ref.key])
            if not all(bool(torch.isfinite(value).all()) for value in values.values()):
                self._broken(f"commit {commit.seq} holds values that are not finite")
            self._versions.setdefault(fragment, {})[commit.seq] = values

    # ---- learners ---------------------------------------------------------------------------------------------------

    def _look_at_learners(self) -> None:
        for machine, incarnation, engine in self._lives:
            if machine.engine is engine and "learner" in machine.processes():
                self._check_globals(machine.name, engine.learner)
                self._check_tokens(machine.name, incarnation, engine.learner)
                self._check_progress(machine.name, engine.learner)

    def _check_globals(self, name: str, learner: Learner) -> None:
        """Every learner's copy of a fragment equals the log's at the version that it says it holds."""
        for fragment, part in enumerate(learner._logic._fragments):
            committed = self._versions[fragment].get(part.version)
            mine = learner._anchors[fragment]
            if committed is None:
                self._broken(f"{name} holds version {part.version} of fragment {fragment}, which was never committed")
            elif any(not torch.equal(mine[key], committed[key]) for key in mine):
                self._broken(f"{name} holds other values of fragment {fragment} than version {part.version}")

    def _check_tokens(self, name: str, incarnation: int, learner: Learner) -> None:
        """No token is lost or counted twice: neither by the learner, nor between it and the log."""
        logic = learner._logic
        for fragment, tally in enumerate(part.fates for part in logic._fragments):
            where = f"{name}, life {incarnation}, fragment {fragment}"
            fates = (tally.merged, tally.refused, tally.late, tally.overwritten, tally.offered, tally.fresh)
            if tally.processed != sum(fates) or min(fates) < 0:
                self._broken(f"{where}: {tally.processed} tokens processed, but {fates}")
            merged = self._credits.get((name, incarnation, fragment), ())
            credited = sum(tokens for seq, tokens in merged if seq <= logic.head)
            if tally.merged != credited:
                self._broken(f"{where}: {tally.merged} tokens merged, the log credits {credited} up to {logic.head}")

    def _check_progress(self, name: str, learner: Learner) -> None:
        """The progress that the learning rate follows never falls."""
        before, now = self._progress.get(id(learner), 0.0), learner._logic.progress
        self._progress[id(learner)] = now
        if now < before:
            self._broken(f"{name}: progress fell from {before} to {now}")

    def _on_heartbeat(self, beat: HeartbeatRecord) -> None:
        """Between two commits a learner's progress moves with its own steps: the learning rate is no staircase."""
        key, learner = (beat.island, beat.incarnation), beat.learner
        before = self._heard.get(key)
        self._heard[key] = learner
        if before is not None and before.adopted == learner.adopted and learner.step >= before.step + 2:
            if learner.progress < 1.0 and learner.skipped_steps == before.skipped_steps:
                self._stairs[0] += 1
                self._stairs[1] += learner.progress > before.progress

    # ---- people -----------------------------------------------------------------------------------------------------

    def disturb(self, island: str, until: float) -> None:
        """An island has an excuse for standing still until that time."""
        self.disturbed[island] = max(until, self.disturbed.get(island, 0.0))

    def check_supervisor(self) -> None:
        """A supervisor kills nobody who is well."""
        said = self._simulation.laptop.said
        for line in said[self._said :]:
            found = KILLED_STILL.search(line)
            if found and self.disturbed.get(found[1], -1.0) < float(line.partition(" ")[0]):
                self._broken(f"the supervisor killed an island that was well: {line}")
        self._said = len(said)

    def check_stairs(self) -> None:
        """To be called at the end: judges what `_on_heartbeat` counted."""
        looks, moved = self._stairs
        if looks >= 10 and moved < STAIRS * looks:
            self._broken(f"the learning rate moved on at {moved} of {looks} looks between two commits only")

    def _note_state(self, commit: CommitRecord) -> None:
        machines = self._simulation.machines.values()
        supervisor = self._simulation.laptop.process
        state = (
            commit.phase,
            len(commit.merged),
            len(commit.refused),
            tuple(
                (
                    tuple((role, process.frozen) for role, process in sorted(machine.processes().items())),
                    machine.learner_status.state,
                    commit.seq - machine.learner_status.adopted,
                    machine.syncer is not None and machine.syncer.on_duty(),
                    bool(machine.link.trouble.verbs),
                )
                for machine in machines
            ),
            supervisor is not None and supervisor.alive,
        )
        self.states.add(hashlib.sha256(repr(state).encode()).hexdigest()[:16])
