"""What comes out of a run: an exported file, a held-out loss, text. Over a blackboard that is written by hand."""

from __future__ import annotations

import itertools
import json
import stat
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from diloco_runtime.blackboard import Blackboard
from diloco_runtime.clock import Clock, Nonces
from diloco_runtime.codec import encode_fragment
from diloco_runtime.config import RunConfig
from diloco_runtime.errors import ConfigError, IncompatibleModel, MissingPayload, RunMismatch
from diloco_runtime.evaluate import fill_parameters, load_model
from diloco_runtime.export import export_safetensors, read_export
from diloco_runtime.fragments import piece_view, table_of, trained_parameters
from diloco_runtime.gpt import build_gpt
from diloco_runtime.keys import fragment_of
from diloco_runtime.records import CommitRecord, PayloadRef, RunRecord
from diloco_runtime.sample import gpt_from_board, gpt_from_export, gpt_from_tensors, sample
from diloco_runtime.store_memory import MemoryStore
from diloco_runtime.task import TaskContext, load_task

RUN_ID = "00000000cafef00d"
PARTS = 3
_FOLDERS = itertools.count()  # memory stores of one folder share what they hold
TEXT = b"To be, or not to be, that is the question. " * 60


def config_in(root: Path, **tables: Any) -> RunConfig:
    (root / "text.txt").write_bytes(TEXT)
    shape = {
        "name": "trial",
        "tokens": 1000,
        "model": {"layers": 1, "heads": 2, "width": 16},
        "data": {"files": ["text.txt"]},
        "inner": {"sequence_length": 16},
        "sync": {"fragments": PARTS},
    }
    return RunConfig.model_validate({**shape, **tables})


class WrittenRun:
    """A blackboard with an initialisation and `commits` commits; commit s adds s to every value of its fragment."""

    def __init__(self, config: RunConfig, clock: Clock, nonces: Nonces, commits: int) -> None:
        self.board = Blackboard(MemoryStore(f"/test-export-{next(_FOLDERS)}"), RUN_ID, clock, nonces)
        record = {"run_id": RUN_ID, "nonce": "run", "name": config.name, "code_version": "9", "created_wall": 0.0}
        self.board.create_run(RunRecord(**record, config=json.loads(config.model_dump_json())))
        model = build_gpt(config.model, config.inner.sequence_length, config.seed)
        self.table = table_of(model, PARTS)
        state = {name: p.detach().clone() for name, p in trained_parameters(model).items()}
        self.states = [state]
        self.payloads: list[PayloadRef] = []
        self.size = sum(p.numel() for p in state.values())
        refs = tuple(self._payload(0, part, state) for part in range(PARTS))
        self._commit(0, -1, refs, fragments=self.table)
        for seq in range(1, commits + 1):
            part = fragment_of(seq, PARTS)
            state = {name: p.clone() for name, p in state.items()}
            for piece in self.table[part].pieces:
                piece_view(state, piece).add_(float(seq))
            self.states.append(state)
            self._commit(seq, part, (self._payload(seq, part, state),), credited_total=seq * 700 * self.size // PARTS)

    def _payload(self, seq: int, part: int, state: dict[str, torch.Tensor]) -> PayloadRef:
        values = {piece.key: piece_view(state, piece) for piece in self.table[part].pieces}
        key = self.board.keys.blob(seq, "params", part, self.board.new_nonce())
        self.payloads.append(self.board.put_payload(key, encode_fragment(values, "fp32")))
        return self.payloads[-1]

    def _commit(self, seq: int, part: int, params: tuple[PayloadRef, ...], **extra: Any) -> None:
        author = {"author": "iowa", "author_incarnation": 1, "successor": "iowa"}
        parent = f"c{seq - 1}" if seq else ""
        identity = {"run_id": RUN_ID, "nonce": f"c{seq}", "seq": seq, "parent": parent, "fragment": part}
        self.board.create(self.board.keys.log(seq), CommitRecord(**identity, **author, params=params, **extra))


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return config_in(tmp_path)


@pytest.fixture
def run(config: RunConfig, clock: Clock, nonces: Nonces) -> WrittenRun:
    return WrittenRun(config, clock, nonces, commits=5)


# ---- export ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seq", "expected"), [(None, 5), (0, 0), (2, 2), (5, 5)])
def test_export_holds_the_parameters_of_that_log_position(
    run: WrittenRun, tmp_path: Path, seq: int | None, expected: int
) -> None:
    path = tmp_path / "model.safetensors"
    report = export_safetensors(run.board, str(path), seq)
    tensors = safetensors.torch.load_file(path)
    assert tensors.keys() == run.states[expected].keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, run.states[expected][name])
    assert (report.seq, report.parameters, report.path) == (expected, run.size, str(path))


def test_export_says_what_it_is(run: WrittenRun, config: RunConfig, tmp_path: Path) -> None:
    path = str(tmp_path / "model.safetensors")
    report = export_safetensors(run.board, path, 3)
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata.pop("format").startswith("diloco-export")
    assert RunConfig.model_validate_json(metadata.pop("config")) == config
    # Three commits, each crediting a third of the model's parameters with 700 tokens.
    assert metadata == {"run": "trial", "run_id": RUN_ID, "seq": "3", "tokens": "700", "code_version": "9"}
    exported = read_export(path)
    assert exported.report == report and exported.config == config


def test_an_existing_file_is_kept_unless_forced(run: WrittenRun, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="exists already; .*--force"):
        export_safetensors(run.board, str(path))
    assert path.read_text() == "precious"
    export_safetensors(run.board, str(path), force=True)
    assert read_export(str(path)).report.seq == 5
    assert [p.name for p in tmp_path.iterdir() if "safetensors" in p.name] == ["model.safetensors"]


def test_an_exported_file_is_as_readable_as_any_other(run: WrittenRun, tmp_path: Path) -> None:
    path, plain = tmp_path / "model.safetensors", tmp_path / "plain"
    export_safetensors(run.board, str(path))
    plain.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_export_to_an_impossible_place_is_refused(run: WrittenRun, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write .*nowhere"):
        export_safetensors(run.board, str(tmp_path / "nowhere" / "model.safetensors"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="cannot write .*folder"):
        export_safetensors(run.board, str(tmp_path / "folder"), force=True)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "diloco-home") == ["folder", "text.txt"]


def test_a_position_that_is_not_kept_leaves_no_file(run: WrittenRun, tmp_path: Path) -> None:
    run.board.store.delete(run.payloads[PARTS].key)  # fragment 0 as commit 1 left it
    path = tmp_path / "model.safetensors"
    with pytest.raises(MissingPayload, match="log position 2"):
        export_safetensors(run.board, str(path), 2)
    assert not path.exists()
    assert export_safetensors(run.board, str(path)).seq == 5


def test_a_position_beyond_the_log_is_refused(run: WrittenRun, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="log position 6 does not exist yet; the newest is 5"):
        export_safetensors(run.board, str(tmp_path / "model.safetensors"), 6)


def test_a_purged_run_is_not_exported(run: WrittenRun, tmp_path: Path) -> None:
    run.board.store.delete("run.json")
    with pytest.raises(RunMismatch):
        export_safetensors(run.board, str(tmp_path / "model.safetensors"))


def test_foreign_files_are_not_taken_for_exports(tmp_path: Path) -> None:
    text, foreign, damaged = (tmp_path / name for name in ("a.txt", "b.safetensors", "c.safetensors"))
    text.write_text("no tensors here")
    safetensors.torch.save_file({"x": torch.zeros(2)}, foreign, {"format": "pt"})
    safetensors.torch.save_file({"x": torch.zeros(2)}, damaged, {"format": "diloco-export-1", "config": "{}"})
    with pytest.raises(ConfigError, match=r"cannot read .*a\.txt as a safetensors file"):
        read_export(str(text))
    with pytest.raises(ConfigError, match="cannot read"):
        read_export(str(tmp_path / "absent.safetensors"))
    with pytest.raises(ConfigError, match="was not written by `diloco export`"):
        read_export(str(foreign))
    with pytest.raises(ConfigError, match="metadata are damaged"):
        read_export(str(damaged))


# ---- evaluate -------------------------------------------------------------------------------------------------------


def test_evaluate_measures_the_global_model_of_that_position(
    run: WrittenRun, config: RunConfig, tmp_path: Path
) -> None:
    fresh = load_task(TaskContext(config, torch.device("cpu"), str(tmp_path)))
    assert load_model(run.board, config, str(tmp_path), 0)[1].held_out_loss() == fresh.held_out_loss()
    fill_parameters(fresh.model, run.states[5], "the test")
    assert load_model(run.board, config, str(tmp_path))[1].held_out_loss() == fresh.held_out_loss()
    commit, task = load_model(run.board, config, str(tmp_path), 2)
    assert commit.seq == 2
    assert all(torch.equal(p, run.states[2][name]) for name, p in trained_parameters(task.model).items())


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"layers": 2, "heads": 2, "width": 16}, r"blocks\.1\..* is \(.*\) here and absent there"),
        ({"layers": 1, "heads": 2, "width": 20}, r"out\.weight is \(20, 20\) here and \(16, 16\) there"),
        ({"layers": 1, "heads": 2, "width": 16, "tied_embeddings": False}, r"head\.weight is \(256, 16\) here"),
    ],
)
def test_another_model_than_the_runs_is_refused_by_its_first_difference(
    run: WrittenRun, tmp_path: Path, model: dict[str, Any], says: str
) -> None:
    with pytest.raises(IncompatibleModel, match=says):
        load_model(run.board, config_in(tmp_path, model=model), str(tmp_path))[1].held_out_loss()


# ---- sample ---------------------------------------------------------------------------------------------------------


def test_text_from_the_blackboard_and_from_the_exported_file_is_the_same(
    run: WrittenRun, config: RunConfig, tmp_path: Path
) -> None:
    path = str(tmp_path / "model.safetensors")
    export_safetensors(run.board, path, 0)
    (tmp_path / "text.txt").unlink()  # no data are needed
    texts = {
        sample(model, b"To be", 40, 1.0, 7) for model in (gpt_from_board(run.board, config, 0), gpt_from_export(path))
    }
    assert len(texts) == 1
    assert sample(gpt_from_board(run.board, config), b"To be", 40, 1.0, 7) not in texts


def test_sampling_something_that_writes_no_text_is_refused(tmp_path: Path) -> None:
    custom = config_in(tmp_path, model={"kind": "my:build"}, data={})
    with pytest.raises(ConfigError, match=r'trains model\.kind = "my:build"'):
        gpt_from_tensors(custom, {}, "run x")


def test_sampling_is_deterministic_in_its_seed(config: RunConfig) -> None:
    model = build_gpt(config.model, 16, seed=1)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    texts = [sample(model, b"a", 30, 1.0, seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(torch.get_rng_state(), before)


def test_temperature_zero_takes_the_likeliest_byte_of_a_sliding_window(config: RunConfig) -> None:
    model = build_gpt(config.model, 16, seed=1)
    expected = list(b"hello")
    for _ in range(30):
        logits = model(torch.tensor([expected[-16:]]))[0, -1]
        expected.append(int(logits.argmax()))
    assert sample(model, b"hello", 30, 0.0, 0) == bytes(expected).decode("utf-8", errors="replace")


def test_temperature_sharpens(config: RunConfig) -> None:
    """With one next byte far likelier than the others a low temperature finds it each time, a high one does not."""
    model = build_gpt(config.model, 16, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embedding.weight[:, 0] = 1.0
        model.embedding.weight[ord("z"), 0] = 3.0
        model.norm.weight.fill_(1.0)
    assert sample(model, b"", 50, 0.1, 0) == "z" * 50
    assert set(sample(model, b"", 50, 50.0, 0)) - {"z"}


def test_odd_arguments(config: RunConfig) -> None:
    model = build_gpt(config.model, 16, seed=1)
    assert sample(model, b"only the prompt", 0, 1.0, 0) == "only the prompt"
    assert sample(model, "é".encode(), 0, 1.0, 0) == "é"
    assert sample(model, b"\xff", 0, 1.0, 0) == "\N{REPLACEMENT CHARACTER}"
    for wrong in ((-1, 1.0), (5, -0.1)):
        with pytest.raises(ConfigError, match="must not be negative"):
            sample(model, b"x", *wrong, seed=0)
