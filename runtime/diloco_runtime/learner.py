"""The learner: inner steps that never wait for the store, and at each step boundary what the logic says.

`Learner.step` is one turn of the main loop. Uploads, downloads and claims happen in the publisher and the follower;
here they are only queued and taken over. What is decided, and why, is in `learner_logic`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from diloco_runtime.blackboard import Blackboard
from diloco_runtime.checkpoint import Resume, capture, restore
from diloco_runtime.clock import Clock
from diloco_runtime.codec import all_finite, roundtrip
from diloco_runtime.config import RunConfig
from diloco_runtime.data_cursor import DataCursor
from diloco_runtime.errors import CorruptObject
from diloco_runtime.follower import Follower, Ready
from diloco_runtime.fragments import read_fragment, trained_parameters, write_fragment
from diloco_runtime.inner import build_optimizer, learning_rate, take_step
from diloco_runtime.learner_logic import LearnerLogic, Offer, smooth
from diloco_runtime.pace import checkpoint_seconds, learner_period
from diloco_runtime.publisher import CheckpointJob, OfferJob, Publisher
from diloco_runtime.records import CheckpointRecord, Fragment, LearnerStatus, PayloadRef
from diloco_runtime.task import Task

STATUS_EVERY = 0.2
"""Seconds between two writes of the local status file while steps are short."""

IDLE_WAIT = 0.25
"""Longest uninterrupted wait of a loop turn that makes no inner step, in seconds; news ends it at once."""

LEAVE_POLL = 0.05
"""Seconds between looks whether the last uploads are done."""


@dataclass(frozen=True)
class Life:
    """Who this learner is and what it works with."""

    config: RunConfig
    island: str
    incarnation: int
    batch_size: int
    table: tuple[Fragment, ...]


class Learner:
    """One life of an island's learner."""

    def __init__(
        self,
        life: Life,
        board: Blackboard,
        clock: Clock,
        task: Task,
        logic: LearnerLogic,
        cursor: DataCursor,
        publisher: Publisher,
        follower: Follower,
        report: Callable[[LearnerStatus], None],
    ) -> None:
        self._life = life
        self._board = board
        self._clock = clock
        self._task = task
        self._logic = logic
        self._cursor = cursor
        self._publisher = publisher
        self._follower = follower
        self._report = report
        self._parameters = trained_parameters(task.model)
        self._optimizer = build_optimizer(task.model, life.config.inner)
        self._anchors: list[Mapping[str, torch.Tensor]] = [read_fragment(self._parameters, f) for f in life.table]
        self._published: dict[int, Mapping[str, torch.Tensor]] = {}
        """Per fragment with an unanswered offer: `anchor - decode(what was sent)`."""
        self._counted_from = [cursor.position for _ in life.table]
        self._step_seconds: float | None = None
        self._step_ended: float | None = None
        self._reported: float | None = None
        self._checkpointed = clock.monotonic()
        self._checkpoints = 0
        self._steps_before = 0
        self._unfinished = ""
        self.status = LearnerStatus()

    def resume(self, resume: Resume) -> None:
        """Continue with the inner state of an earlier life."""
        if resume.checkpoint is None:
            return
        self._logic.progress = resume.checkpoint.progress
        self._steps_before = resume.checkpoint.step
        try:
            restore(self._optimizer, self._parameters, resume.tensors)
        except (CorruptObject, RuntimeError, TypeError) as error:
            # The moments are a head start, not the model: an island that cannot use them starts without.
            self._optimizer.state.clear()
            self._unfinished = f"the inner checkpoint cannot be used, starting without it: {error}"

    # ---- one turn -----------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Adopt what is there, make an inner step unless the run drains or a barrier holds, call and offer.

        Returns False when the run is over and this learner has adopted its end.
        """
        self._publisher.head = self._follower.head.seq
        for ready in self._follower.take():
            self._adopt(ready)
        self._logic.on_called(self._follower.called)
        if self._logic.phase == "final":
            self._update("finished", force=True)
            return False
        if self._logic.phase == "drain":
            self._offer(self._logic.offers())
            # With every possible offer out, the syncer need not wait for this island any longer.
            done = not self._publisher.offers_waiting() and not self._follower.pending()
            self._idle("finished" if done else "draining")
        elif not self._cursor.ready() or self._logic.must_wait():
            self._idle("waiting")
        else:
            self._inner_step()
            self._logic.on_called(self._follower.called)  # what was called during the step is answered after it
            self._decide()
            self._update("training")
        return True

    def _idle(self, state: str) -> None:
        self._follower.news.clear()
        started = self._clock.monotonic()
        self._update(state)
        if not self._follower.has_ready():
            self._follower.news.wait(IDLE_WAIT)
        waited = self._clock.monotonic() - started
        self._step_ended = None
        self.status = self.status.model_copy(
            update={
                "ticks": self.status.ticks + 1,
                "waited_seconds": self.status.waited_seconds + (waited if state == "waiting" else 0.0),
            }
        )

    def _inner_step(self) -> None:
        started = self._clock.monotonic()
        part = self._cursor.take(self._life.batch_size)
        batch = self._task.batch(part.data_pass, part.unit_index, part.start, part.count)
        rate = learning_rate(self._logic.update_progress(), self._life.config.inner)
        result = take_step(self._task, self._optimizer, batch, rate, self._life.config.inner.grad_clip)
        if result.finite:
            self._logic.on_step(self._task.batch_tokens(batch))
            self._unfinished = ""
        else:
            self._unfinished = "loss or gradient is not finite; the inner step was undone"
        ended = self._clock.monotonic()
        self._step_seconds = smooth(self._step_seconds, ended - started)
        gap = ended - (self._step_ended if self._step_ended is not None else started)
        self._step_ended = ended
        steps = self._life.config.sync.sync_every / len(self._life.table)
        self._follower.period = learner_period(self._step_seconds, steps, self._follower.commit_seconds)
        status = self.status
        self.status = status.model_copy(
            update={
                "ticks": status.ticks + 1,
                "step": self._steps_before + self._logic.step,
                "loss": result.loss if result.finite else status.loss,
                "lr": rate,
                "progress": self._logic.progress,
                "busy_seconds": status.busy_seconds + (ended - started),
                "longest_gap": max(status.longest_gap, gap),
                "skipped_steps": status.skipped_steps + (not result.finite),
                "reread_samples": status.reread_samples + (part.count if part.reread else 0),
            }
        )

    # ---- call, offer, adopt -------------------------------------------------------------------------------------

    def _decide(self) -> None:
        seq = self._logic.call()
        if seq is not None:
            self._publisher.call(seq)
            self._logic.on_called(seq)
        early = self._logic.early_steps(self._publisher.publish_seconds, self._step_seconds)
        if self._publisher.offers_waiting():
            early = 0.0  # one upload at a time: a snapshot that waits in the outbox only grows old
        self._offer(self._logic.offers(early))
        every = checkpoint_seconds(self._life.config.sync.checkpoint_every, self._publisher.checkpoint_seconds)
        if self._clock.monotonic() - self._checkpointed >= every:
            self.checkpoint()

    def _offer(self, offers: list[Offer]) -> None:
        for offer in offers:
            fragment, anchor = self._life.table[offer.fragment], self._anchors[offer.fragment]
            local = read_fragment(self._parameters, fragment)
            delta = {key: anchor[key] - local[key] for key in local}
            sent = roundtrip(delta, self._life.config.sync.compression)
            if not all_finite(sent):
                # Nothing that is not finite leaves an island: start again from what everybody has.
                write_fragment(self._parameters, fragment, anchor)
                self._logic.on_bad_delta(offer.fragment)
                self._unfinished = f"fragment {offer.fragment} was not finite and was reset to its anchor"
                resets = self.status.reset_fragments + 1
                self.status = self.status.model_copy(update={"reset_fragments": resets})
                continue
            self._published[offer.fragment] = {key: anchor[key] - sent[key] for key in sent}
            nonce = self._board.new_nonce()
            position = self._cursor.position
            self._logic.offered(offer, nonce)
            self._publisher.offer(
                OfferJob(offer, nonce, delta, self._logic.fates(), self._counted_from[offer.fragment], position)
            )
            self._counted_from[offer.fragment] = position

    @torch.no_grad()
    def _adopt(self, ready: Ready) -> None:
        adoption = self._logic.on_commit(ready.commit)
        published = self._published.pop(adoption.fragment, None)
        if ready.values is None:
            return
        fragment = self._life.table[adoption.fragment]
        if adoption.carry and published is not None:
            local = read_fragment(self._parameters, fragment)
            values = {key: new + (local[key] - published[key]) for key, new in ready.values.items()}
            write_fragment(self._parameters, fragment, values)
        else:
            write_fragment(self._parameters, fragment, ready.values)
            self._counted_from[adoption.fragment] = self._cursor.position
        self._anchors[adoption.fragment] = ready.values

    # ---- checkpoint, leave --------------------------------------------------------------------------------------

    def checkpoint(self) -> bool:
        """Queue a checkpoint of the inner state; False while an earlier one is still on its way."""
        self._checkpointed = self._clock.monotonic()
        record = CheckpointRecord(
            run_id=self._board.run_id,
            nonce=self._board.new_nonce(),
            island=self._life.island,
            incarnation=self._life.incarnation,
            number=self._checkpoints + 1,
            log_position=self._logic.head,
            step=self._steps_before + self._logic.step,
            progress=self._logic.progress,
            position=self._cursor.position,
            payload=PayloadRef(key="-", size=1, sha256=""),
        )
        queued = self._publisher.checkpoint(CheckpointJob(record, capture(self._optimizer, self._parameters)))
        self._checkpoints += queued
        return queued

    def leave(self, deadline: float) -> bool:
        """Offer what can be offered, checkpoint, and wait for the uploads until `deadline` (monotonic seconds).

        Returns whether everything is on the blackboard.
        """
        self._offer(self._logic.last_offers())
        queued = False
        while self._clock.monotonic() < deadline:
            queued = queued or self.checkpoint()
            if queued and not self._publisher.busy():
                break
            self._update("draining")
            self._clock.sleep(LEAVE_POLL)
        done = queued and not self._publisher.busy()
        self._update("finished", force=True)
        return done

    # ---- status -------------------------------------------------------------------------------------------------

    def _update(self, state: str, force: bool = False) -> None:
        """Hand the status to the agent, at most every `STATUS_EVERY` seconds unless it says something new."""
        now = self._clock.monotonic()
        new = state != self.status.state
        if not (force or new) and self._reported is not None and now - self._reported < STATUS_EVERY:
            return
        self._reported = now
        rates = [r for r in (self._publisher.bandwidth, self._follower.bandwidth) if r]
        self.status = self.status.model_copy(
            update={
                "state": state,
                "adopted": self._logic.head,
                "step_seconds": self._step_seconds,
                "in_flight": self._logic.in_flight,
                "publish_seconds": self._publisher.publish_seconds,
                "bandwidth": min(rates) if rates else 0.0,
                "position": self._cursor.position,
                "checkpoint": self._publisher.checkpoint_done,
                "fates": self._logic.fates(),
                "problem": self._unfinished or self._publisher.problem or self._follower.problem,
            }
        )
        self._report(self.status)
