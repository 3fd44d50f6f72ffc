"""Text as samples: every token once per pass, nothing held out among them, readable at any place."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_runtime.config import DataConfig
from diloco_runtime.errors import ConfigError
from diloco_runtime.text_data import ByteStream, Span, TextData, find_files, permutation, split_files


def numbered(count: int, start: int = 0) -> bytes:
    """Bytes in which every run of 7 tells its place (numbers of 3 bytes, big end first, each after 0xff)."""
    digits = b"".join(
        b"\xff" + bytes((n // 62500, n // 250 % 250, n % 250)) for n in range(start, start + count // 4 + 2)
    )
    return digits[:count]


def write(root: Path, **files: bytes) -> str:
    for name, content in files.items():
        (root / f"{name}.txt").write_bytes(content)
    return str(root)


def all_rows(data: TextData, data_pass: int = 0) -> list[bytes]:
    return [
        row.tobytes()
        for unit in range(data.num_units())
        for row in data.samples(data_pass, unit, 0, data.unit_samples(data_pass, unit))
    ]


CASES = {
    "sizes": st.lists(st.integers(0, 700), min_size=1, max_size=5),
    "length": st.integers(2, 40),
    "unit_tokens": st.integers(1, 300),
    "seed": st.integers(0, 2**40),
    "data_pass": st.integers(0, 1000),
}


@settings(max_examples=150, deadline=None)
@given(**CASES)
def test_units_partition_the_tokens_exactly(
    sizes: list[int], length: int, unit_tokens: int, seed: int, data_pass: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        contents = {f"f{i}": numbered(size, 1000 * i) for i, size in enumerate(sizes)}
        root = write(Path(folder), **contents)
        (Path(folder) / "held.text").write_bytes(bytes(50))
        config = DataConfig(files=("*.txt",), held_out_files=("held.text",), unit_tokens=unit_tokens)
        stream = b"".join(contents[name] for name in sorted(contents))
        if len(stream) <= length:
            with pytest.raises(ConfigError, match="one sample needs"):
                TextData(root, config, length, seed)
            return
        data = TextData(root, config, length, seed)
        rows = all_rows(data, data_pass)
    # Cutting the stream every `length` bytes gives each predicted byte to exactly one sample; a rest is left out.
    whole = (len(stream) - 1) // length
    assert len(stream) - 1 - whole * length < length
    assert sorted(rows) == sorted(stream[i * length : (i + 1) * length + 1] for i in range(whole))
    sizes_of_units = [data.unit_samples(data_pass, unit) for unit in range(data.num_units())]
    full = max(1, unit_tokens // length)
    assert sum(sizes_of_units) == whole
    assert sorted(sizes_of_units)[1:] == [full] * (data.num_units() - 1)
    assert 1 <= min(sizes_of_units) <= full


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(0, 900), min_size=1, max_size=4), fraction=st.floats(0.01, 0.49))
def test_held_out_fraction_shares_no_byte_with_training(sizes: list[int], fraction: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = write(Path(folder), **{f"f{i}": bytes(size) for i, size in enumerate(sizes)})
        training, held_out = split_files(root, DataConfig(files=("*.txt",), held_out_fraction=fraction))
        for size, train, held in zip(sizes, training, held_out, strict=True):
            assert (train.path, train.start, train.stop) == (held.path, 0, held.start)
            assert (held.stop, held.stop - held.start) == (size, int(size * fraction))


@settings(max_examples=60, deadline=None)
@given(starts=st.lists(st.integers(0, 60), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_any_slice_is_the_same_whatever_was_read_before(starts: list[int], seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = write(Path(folder), a=numbered(2000), b=numbered(900, 3000))
        config = DataConfig(files=("*.txt",), unit_tokens=128)
        walked = TextData(root, config, 8, seed)
        for start in starts:
            unit, offset = divmod(start, 3)
            unit %= walked.num_units() - 1
            count = min(5, walked.unit_samples(2, unit) - offset)
            if count < 1:
                continue
            fresh = TextData(root, config, 8, seed)
            assert np.array_equal(walked.samples(2, unit, offset, count), fresh.samples(2, unit, offset, count))
            whole = fresh.samples(2, unit, 0, fresh.unit_samples(2, unit))
            assert np.array_equal(whole[offset : offset + count], walked.samples(2, unit, offset, count))


def test_a_unit_is_a_run_of_neighbouring_samples_in_shuffled_order(tmp_path: Path) -> None:
    data = TextData(write(tmp_path, a=numbered(6000)), DataConfig(files=("a.txt",), unit_tokens=400), 20, seed=1)
    stream = numbered(6000)
    rows = [row.tobytes() for row in data.samples(0, 2, 0, 20)]
    places = [stream.index(row) // 20 for row in rows]
    assert sorted(places) == list(range(min(places), min(places) + 20))
    assert places != sorted(places)
    assert data.unit_range(0, 2) == (min(places), min(places) + 20)


def test_order_depends_on_seed_and_pass(tmp_path: Path) -> None:
    root, config = write(tmp_path, a=numbered(9000)), DataConfig(files=("a.txt",), unit_tokens=100)
    one, same, other = TextData(root, config, 10, 1), TextData(root, config, 10, 1), TextData(root, config, 10, 2)
    assert all_rows(one) == all_rows(same)
    assert all_rows(one) != all_rows(other)
    assert all_rows(one, 0) != all_rows(one, 1)
    assert sorted(all_rows(one, 0)) == sorted(all_rows(one, 1))


EXPECTED_ORDER = [3, 0, 7, 4, 2, 1, 5, 9, 8, 6]


def test_permutation_is_fixed_for_ever() -> None:
    """Islands with other versions of Python or numpy must agree; so must a run before and after an upgrade."""
    assert permutation(10, "units 0 0").tolist() == EXPECTED_ORDER
    assert sorted(permutation(1000, "x").tolist()) == list(range(1000))
    assert permutation(1, "x").tolist() == [0]


def test_samples_beyond_a_unit_are_refused(tmp_path: Path) -> None:
    data = TextData(write(tmp_path, a=numbered(900)), DataConfig(files=("a.txt",), unit_tokens=80), 10, 0)
    with pytest.raises(IndexError, match=r"samples \[5, 9\) of a unit with 8"):
        data.samples(0, 1, 5, 4)


def test_held_out_is_fixed_bounded_and_evenly_spread(tmp_path: Path) -> None:
    root = write(tmp_path, train=numbered(500), test=numbered(10_010, 5000))
    config = DataConfig(files=("train.txt",), held_out_files=("test.txt",))
    data = TextData(root, config, 100, 0)
    few, all_of_it = data.held_out(1000), data.held_out(10**9)
    assert few.shape == (10, 101) and all_of_it.shape == (100, 101)
    stream = numbered(10_010, 5000)
    assert [stream.index(row.tobytes()) for row in few] == [1000 * i for i in range(10)]
    assert np.array_equal(few, TextData(root, config, 100, 77).held_out(1000))
    assert data.held_out(1).shape == (1, 101)


def test_a_file_that_is_held_out_is_never_trained_on(tmp_path: Path) -> None:
    root = write(tmp_path, a=numbered(800), b=numbered(800, 2000))
    os.symlink(tmp_path / "b.txt", tmp_path / "c.txt")
    training, held_out = split_files(root, DataConfig(files=("*.txt",), held_out_files=("b.txt",)))
    assert [os.path.basename(span.path) for span in training] == ["a.txt"]
    assert [os.path.basename(span.path) for span in held_out] == ["b.txt"]


def test_files_are_sorted_and_each_is_there_once(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for name in ("b.txt", "a.txt", "deep/c.txt", "deep/er/d.txt"):
        (tmp_path / name).write_bytes(b"x")
    found = find_files(str(tmp_path), ("deep/**/*.txt", "*.txt", "b.txt", "./a.txt"), "files")
    names = [os.path.relpath(path, os.path.realpath(tmp_path)) for path in found]
    assert names == ["a.txt", "b.txt", "deep/c.txt", "deep/er/d.txt"]
    assert find_files(str(tmp_path), (str(tmp_path / "b.txt"),), "files") == [os.path.realpath(tmp_path / "b.txt")]


@pytest.mark.parametrize("key", ["files", "held_out_files"])
def test_a_pattern_without_a_match_is_refused_by_name(tmp_path: Path, key: str) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(5000))
    (tmp_path / "folder.md").mkdir()
    config = DataConfig(**{"files": ("a.txt",), key: ("a.txt", "*.md")})
    with pytest.raises(ConfigError, match=rf'\[data\] {key}: "\*.md" matches no file below .*correct the pattern'):
        TextData(str(tmp_path), config, 16, 0)


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    root = write(tmp_path, a=bytes(400))
    with pytest.raises(ConfigError, match=r"the held-out text of \[data\] has 20 bytes; one sample needs 33"):
        TextData(root, DataConfig(files=("a.txt",)), 32, 0)
    with pytest.raises(ConfigError, match=r"less what is held out, have 0 bytes"):
        TextData(root, DataConfig(files=("*.txt",), held_out_files=("a.txt",)), 32, 0)


def test_a_file_that_shrinks_or_goes_is_reported(tmp_path: Path) -> None:
    root = write(tmp_path, a=numbered(5000))
    data = TextData(root, DataConfig(files=("a.txt",), unit_tokens=64), 16, 0)
    last = max(range(data.num_units()), key=lambda unit: data.unit_range(0, unit))
    (tmp_path / "a.txt").write_bytes(bytes(100))
    with pytest.raises(ConfigError, match="became shorter"):
        data.samples(0, last, 0, 1)
    (tmp_path / "a.txt").unlink()
    with pytest.raises(ConfigError, match="cannot read the data file"):
        data.samples(0, last, 0, 1)


def test_fingerprint_follows_contents_and_nothing_else(tmp_path: Path) -> None:
    def fingerprint(folder: str, **files: bytes) -> str:
        (tmp_path / folder).mkdir()
        return TextData(write(tmp_path / folder, **files), DataConfig(files=("*.txt",)), 8, 0).fingerprint()

    first = fingerprint("one", a=numbered(3000), b=numbered(500, 7))
    assert first == fingerprint("two", a=numbered(3000), b=numbered(500, 7))
    changed = numbered(3000)[:-1] + b"!"  # in the held-out part
    assert first != fingerprint("three", a=changed, b=numbered(500, 7))
    assert first != fingerprint("four", a=b"!" + numbered(3000)[1:], b=numbered(500, 7))


@given(cuts=st.lists(st.integers(0, 300), min_size=2, max_size=6), ends=st.tuples(st.integers(0), st.integers(0)))
@settings(max_examples=100, deadline=None)
def test_a_stream_reads_like_the_joined_spans(cuts: list[int], ends: tuple[int, int]) -> None:
    content = numbered(300)
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        spans = [Span(file.name, min(a, b), max(a, b)) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
        stream = ByteStream(spans)
        joined = b"".join(content[span.start : span.stop] for span in spans)
        assert len(stream) == len(joined)
        start, stop = sorted(end % (len(joined) + 1) for end in ends)
        if start < stop:
            assert stream.read(start, stop).tobytes() == joined[start:stop]
