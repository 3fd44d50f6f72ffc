"""Inner state of a learner: captured and put back exactly, complete or not there, and where a new life goes on."""

from __future__ import annotations

import itertools

import pytest
import safetensors.torch
import torch

from diloco_runtime.blackboard import Blackboard
from diloco_runtime.checkpoint import LIVES_SEARCHED, Resume, capture, find_resume, restore
from diloco_runtime.config import InnerConfig
from diloco_runtime.errors import CorruptObject, StoreUnavailable
from diloco_runtime.fragments import trained_parameters
from diloco_runtime.inner import build_optimizer, take_step
from diloco_runtime.publisher import CheckpointJob, Publisher
from diloco_runtime.records import CheckpointRecord, OfferRecord, Position
from diloco_runtime.store import ObjectStore
from diloco_runtime.store_memory import MemoryStore
from tests.behaviours.faults import Unwritable, Wrapped
from tests.behaviours.samples import run_record
from tests.support.run_records import PAYLOAD, RUN_ID, commit
from tests.support.tasks import LinearTask

_numbers = itertools.count()
FRAGMENTS = 3
STATE = {"w|exp_avg": torch.tensor([1.5, -2.0]), "rng": torch.arange(4, dtype=torch.uint8)}


def at(offset: int) -> Position:
    return Position(data_pass=0, unit_index=7, offset=offset)


# ---- capturing and putting back -------------------------------------------------------------------------------------


class NoisyTask(LinearTask):
    """A loss that draws random numbers, as dropout does, and has a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__(width=4, layers=2)
        self.model.register_parameter("scale", torch.nn.Parameter(torch.tensor(2.0)))

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return ((self.model(batch + torch.randn(batch.shape)) - batch) ** 2).mean() * self.model.scale


class Training:
    """A model with its optimizer."""

    def __init__(self, optimizer: str = "adamw") -> None:
        self.task = NoisyTask()
        self.inner = InnerConfig(optimizer=optimizer, lr=0.01)
        self.parameters = trained_parameters(self.task.model)
        self.optimizer = build_optimizer(self.task.model, self.inner)

    def steps(self, count: int) -> None:
        batch = torch.arange(32.0).reshape(8, 4) / 32
        for _ in range(count):
            assert take_step(self.task, self.optimizer, batch, self.inner.lr, 1.0).finite

    def values(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.parameters.items()}

    def load(self, values: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, value in values.items():
                self.parameters[name].copy_(value)

    def capture(self) -> dict[str, torch.Tensor]:
        return capture(self.optimizer, self.parameters)

    def restore(self, tensors: dict[str, torch.Tensor]) -> None:
        restore(self.optimizer, self.parameters, tensors)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype and torch.equal(found[key], value), key


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_restored_life_makes_the_very_steps_that_would_have_been_made(optimizer: str) -> None:
    """Moments, step counters and random state, through the bytes of a payload, bit for bit."""
    torch.manual_seed(5)
    first = Training(optimizer)
    first.steps(4)
    data, parameters = safetensors.torch.save(first.capture()), first.values()
    first.steps(3)
    expected = first.capture()
    torch.manual_seed(77)
    second = Training(optimizer)
    second.load(parameters)
    second.restore(safetensors.torch.load(data))
    second.steps(3)
    assert_equal(second.values(), first.values())
    assert_equal(second.capture(), expected)


def test_the_moments_of_every_parameter_are_in_it() -> None:
    training = Training()
    assert training.capture().keys() == {"rng"}, "before the first step there are no moments"
    training.steps(1)
    slots = {f"{name}|{slot}" for name in training.parameters for slot in ("step", "exp_avg", "exp_avg_sq")}
    assert training.capture().keys() == {"rng"} | slots


def test_what_was_captured_does_not_change_with_the_training() -> None:
    training = Training()
    training.steps(2)
    captured = training.capture()
    before = {key: value.clone() for key, value in captured.items()}
    training.steps(2)
    assert_equal(captured, before)


def test_the_random_state_alone_comes_back_exactly() -> None:
    training = Training()
    captured = training.capture()
    expected = torch.randn(5)
    torch.manual_seed(123)
    training.restore(captured)
    assert torch.equal(torch.randn(5), expected)


def test_moments_of_another_model_are_refused_and_unknown_names_left_out() -> None:
    training = Training()
    training.restore({"elsewhere|exp_avg": torch.zeros(3)})
    assert training.capture().keys() == {"rng"}
    with pytest.raises(CorruptObject, match=r"checkpoint: scale\|exp_avg has shape \(2,\), not \(\)"):
        training.restore({"scale|exp_avg": torch.zeros(2)})


# ---- a run with checkpoints, offers and commits ---------------------------------------------------------------------


class Run:
    """A run's blackboard on which lives of island iowa leave what a new life finds."""

    def __init__(self, clock, nonces, store: ObjectStore | None = None) -> None:
        self.clock, self.nonces = clock, nonces
        self.store = store or MemoryStore(f"unit/checkpoint-{next(_numbers)}")
        self.board = Blackboard(self.store, RUN_ID, clock, nonces)
        self.board.create_run(run_record(RUN_ID))
        self.head = commit(0, FRAGMENTS)
        self.board.create(self.board.keys.log(0), self.head)

    def checkpoint(
        self, life: int, number: int, position: Position, log_position: int = 0, board: Blackboard | None = None
    ) -> None:
        """Publish a checkpoint; its tensors tell life and number."""
        record = CheckpointRecord(
            run_id=RUN_ID, nonce=f"k{life}-{number}", island="iowa", incarnation=life, number=number,
            log_position=log_position, step=10 * number, progress=0.5, position=position, payload=PAYLOAD,
        )  # fmt: skip
        publisher = Publisher(board or self.board, self.clock, "iowa", life, "fp32")
        publisher.checkpoint(CheckpointJob(record, {**STATE, "mark": torch.tensor([life, number])}))
        assert publisher.checkpoint_once()

    def offer(self, seq: int, life: int, data_to: Position, island: str = "iowa") -> str:
        """Record an offer; return its nonce."""
        nonce = f"{island}{life}to{seq}"
        record = OfferRecord(
            run_id=RUN_ID, nonce=nonce, seq=seq, fragment=(seq - 1) % FRAGMENTS, island=island, incarnation=life,
            anchor=max(0, seq - FRAGMENTS), inner_steps=1, tokens=1, codec="fp32", payload=PAYLOAD,
            data_from=Position(), data_to=data_to, fates=(),
        )  # fmt: skip
        self.board.create(self.board.keys.offer(seq, island, life), record)
        return nonce

    def commit(self, **positions: Position) -> None:
        """Append a commit that says how far the data of islands' merged offers reaches."""
        self.head = commit(self.head.seq + 1, FRAGMENTS, positions={**self.head.positions, **positions})
        self.board.create(self.board.keys.log(self.head.seq), self.head)

    def resume(self, life: int) -> Resume:
        return find_resume(self.board, "iowa", life, self.head, FRAGMENTS)

    def kept(self, life: int) -> list[int]:
        """Return the numbers of a life's checkpoints that are there, payload and marker."""
        names = ("inner.safetensors", "checkpoint.json")
        found = [[n for n in range(1, 10) if self.store.get(self.key(life, n, name))] for name in names]
        assert found[0] == found[1]
        return found[0]

    def key(self, life: int, number: int, name: str = "inner.safetensors") -> str:
        return self.board.keys.checkpoint("iowa", life, number, name)


@pytest.fixture
def run(clock, nonces) -> Run:
    return Run(clock, nonces)


def mark(resume: Resume) -> tuple[int, ...]:
    """Return life and number of the checkpoint that was found."""
    assert resume.checkpoint is not None
    found = (resume.checkpoint.incarnation, resume.checkpoint.number)
    assert tuple(resume.tensors["mark"].tolist()) == found
    return found


# ---- complete or not there ------------------------------------------------------------------------------------------


class Recorder(Wrapped):
    """Remembers in which order objects were written."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.written: list[str] = []

    def create(self, key: str, data: bytes) -> None:
        self.inner.create(key, data)
        self.written.append(key)

    def put(self, key: str, data: bytes) -> None:
        self.inner.put(key, data)
        self.written.append(key)


def test_the_payload_is_written_first_and_the_marker_last(run: Run, clock, nonces) -> None:
    store = Recorder(run.store)
    run.checkpoint(1, 1, at(5), board=Blackboard(store, RUN_ID, clock, nonces))
    assert store.written == [run.key(1, 1), run.key(1, 1, "checkpoint.json")]
    record = run.board.read_checkpoint("iowa", 1, 1)
    assert record is not None and record.payload.key == run.key(1, 1)
    assert_equal(safetensors.torch.load(run.board.get_payload(record.payload)), {**STATE, "mark": torch.tensor([1, 1])})


def test_a_checkpoint_without_its_marker_is_ignored(run: Run, clock, nonces) -> None:
    run.checkpoint(1, 1, at(5))
    with pytest.raises(StoreUnavailable):
        run.checkpoint(1, 2, at(9), board=Blackboard(Unwritable(run.store), RUN_ID, clock, nonces))
    assert run.store.get(run.key(1, 2)) is not None
    assert mark(run.resume(2)) == (1, 1) and run.resume(2).position == at(5)


@pytest.mark.parametrize("damage", ["cut", "other bit", "gone", "no safetensors", "marker"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(run: Run, damage: str) -> None:
    run.checkpoint(1, 1, at(5))
    run.checkpoint(1, 2, at(9))
    assert mark(run.resume(2)) == (1, 2)
    key = run.key(1, 2)
    data = run.store.get(key) or b""
    if damage == "cut":
        run.store.put(key, data[:-1])
    elif damage == "other bit":
        run.store.put(key, data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "gone":
        run.store.delete(key)
    elif damage == "marker":
        run.store.put(run.key(1, 2, "checkpoint.json"), b'{"schema_version": 1}')
    else:
        record = run.board.read_checkpoint("iowa", 1, 2)
        assert record is not None
        ref = run.board.put_payload(key, b"pickle would run this")
        marker = record.model_copy(update={"payload": ref})
        run.store.put(run.key(1, 2, "checkpoint.json"), marker.model_dump_json().encode())
    assert mark(run.resume(2)) == (1, 1) and run.resume(2).position == at(5)


def test_the_newest_number_of_the_newest_life_wins(run: Run) -> None:
    for number in (1, 2, 9, 10, 11):
        run.checkpoint(1, number, at(number))
    assert mark(run.resume(2)) == (1, 11)
    run.checkpoint(2, 1, at(50))
    assert mark(run.resume(3)) == (2, 1)
    assert_equal(run.resume(3).tensors, {**STATE, "mark": torch.tensor([2, 1])})


def test_the_newest_two_are_kept(run: Run) -> None:
    for number in range(1, 6):
        run.checkpoint(1, number, at(number))
        assert run.kept(1) == list(range(max(1, number - 1), number + 1))


def test_checkpoints_of_earlier_lives_stay_until_the_new_life_has_two(run: Run) -> None:
    for number in (1, 2, 3):
        run.checkpoint(1, number, at(number))
    run.checkpoint(2, 1, at(4))
    assert [run.kept(1), run.kept(2)] == [[2, 3], [1]]
    run.checkpoint(2, 2, at(5))
    assert [run.kept(1), run.kept(2)] == [[], [1, 2]]
    assert run.store.list(run.board.keys.checkpoints("iowa", 1)) == []


def test_lives_without_a_checkpoint_are_passed_over_but_not_without_end(run: Run) -> None:
    run.checkpoint(1, 1, at(5))
    assert run.resume(1).checkpoint is None, "a life does not resume from itself"
    assert mark(run.resume(1 + LIVES_SEARCHED)) == (1, 1)
    assert run.resume(2 + LIVES_SEARCHED).checkpoint is None


def test_a_first_life_starts_from_nothing(run: Run) -> None:
    resume = run.resume(1)
    assert resume == Resume(Position(), None, {})
    assert resume.describe() == "data position 0/-1/0, no inner checkpoint"
    run.checkpoint(3, 2, at(5))
    assert run.resume(4).describe() == "data position 0/7/5, inner checkpoint 3/2 of step 20"


# ---- the position from which nothing is trained twice ---------------------------------------------------------------


def test_a_merged_offer_after_the_checkpoint_moves_the_position_on(run: Run) -> None:
    run.checkpoint(1, 1, at(5))
    run.commit(iowa=at(8))
    run.commit(oregon=at(99))
    assert run.resume(2).position == at(8) and mark(run.resume(2)) == (1, 1)


def test_a_merged_offer_before_the_checkpoint_changes_nothing(run: Run) -> None:
    run.commit(iowa=at(3))
    run.checkpoint(1, 1, at(5), log_position=1)
    assert run.resume(2).position == at(5)


def test_without_a_checkpoint_the_merged_offers_say_where_however_long_ago(run: Run) -> None:
    run.commit(iowa=at(6))
    for _ in range(20):
        run.commit()
    assert run.resume(2).position == at(6) and run.resume(2).checkpoint is None


def test_an_offer_that_may_still_be_merged_counts(run: Run) -> None:
    run.checkpoint(1, 1, at(5))
    run.commit(iowa=at(6))
    run.offer(2, 1, at(7))
    run.offer(4, 1, at(12))
    run.offer(4, 1, at(40), island="oregon")
    assert run.resume(2).position == at(12)


def test_an_offer_that_came_too_late_does_not_count(run: Run) -> None:
    """Its samples are in nobody's parameters: they are to be read again."""
    run.checkpoint(1, 1, at(5))
    run.offer(1, 1, at(7))
    run.commit()
    assert run.resume(2).position == at(5)


def test_a_later_unit_and_a_later_pass_are_later_whatever_the_offset(run: Run) -> None:
    run.commit(iowa=Position(data_pass=0, unit_index=9, offset=900))
    run.offer(2, 1, Position(data_pass=1, unit_index=0, offset=1))
    run.offer(3, 1, Position(data_pass=0, unit_index=10, offset=3))
    assert run.resume(2).position == Position(data_pass=1, unit_index=0, offset=1)
