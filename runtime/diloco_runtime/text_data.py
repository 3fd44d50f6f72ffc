"""Text files as numbered samples: which bytes are trained on, in which order, by whom. Knows nothing of torch.

All training bytes form one stream, file after file in sorted order. Sample i holds the `L + 1` bytes from `i * L` on
(`L` = sequence length): its first `L` bytes predict its last `L`, so neighbouring samples share one byte and every byte
is predicted once. A unit is a run of whole samples, about `unit_tokens` tokens. What is left at the end of the stream,
fewer than `L` bytes, is never read; the last unit may be shorter than the others.

A pass hands out all units in an order of its own. Orders come from a hash of seed and pass, not from a random number
library, so that islands with different library versions agree.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from diloco_runtime.config import DataConfig
from diloco_runtime.errors import ConfigError

Bytes = npt.NDArray[np.uint8]

_BLOCKS, _BLOCK = 1024, 4096
"""How many blocks of how many bytes of a stream its digest covers: 4 MiB at every start, however large the data."""


@dataclass(frozen=True)
class Span:
    """Bytes `[start, stop)` of a file."""

    path: str
    start: int
    stop: int


class ByteStream:
    """Spans of files read as one array, without holding it in memory."""

    def __init__(self, spans: list[Span]) -> None:
        self._spans = [span for span in spans if span.stop > span.start]
        self._ends = np.cumsum([span.stop - span.start for span in self._spans], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._spans else 0

    def read(self, start: int, stop: int) -> Bytes:
        """Return bytes `[start, stop)` of the stream."""
        parts = [np.frombuffer(_read_file(part), np.uint8) for part in self._between(start, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _between(self, start: int, stop: int) -> Iterator[Span]:
        index = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            span, end = self._spans[index], int(self._ends[index])
            offset = span.stop - end
            until = min(stop, end)
            yield Span(span.path, start + offset, until + offset)
            start, index = until, index + 1

    def digest(self) -> bytes:
        """Return a SHA-256 of the stream's length and of blocks spread evenly over it, both ends included."""
        size = len(self)
        found = hashlib.sha256(str(size).encode())
        last = max(0, size - _BLOCK)
        count = min(_BLOCKS, -(-size // _BLOCK))
        for start in sorted({last * i // max(1, count - 1) for i in range(count)}):
            found.update(self.read(start, min(start + _BLOCK, size)).data)
        return found.digest()


class TextData:
    """The samples of a run, readable at any place; equal wherever the files, the spec and the seed are equal."""

    def __init__(self, root: str, data: DataConfig, sequence_length: int, seed: int) -> None:
        """Look at the sizes of the files. Raises `ConfigError` when there are none or too few bytes in them."""
        training, held_out = split_files(root, data)
        self._training, self._held_out = ByteStream(training), ByteStream(held_out)
        self._length = sequence_length
        self._seed = seed
        self.num_samples = _samples_in(self._training, sequence_length, "[data] files, less what is held out, have")
        self._samples_per_unit = max(1, data.unit_tokens // sequence_length)
        self._num_held_out = _samples_in(self._held_out, sequence_length, "the held-out text of [data] has")
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None
        self._unit: tuple[int, int, Bytes] | None = None

    def num_units(self) -> int:
        """Return the number of units in a pass."""
        return -(-self.num_samples // self._samples_per_unit)

    def unit_samples(self, data_pass: int, unit_index: int) -> int:
        """Return the number of samples in the unit handed out `unit_index`-th in `data_pass`."""
        first, stop = self.unit_range(data_pass, unit_index)
        return stop - first

    def unit_range(self, data_pass: int, unit_index: int) -> tuple[int, int]:
        """Return which samples of the stream, `[first, stop)`, that unit consists of."""
        if self._order is None or self._order[0] != data_pass:
            self._order = (data_pass, permutation(self.num_units(), f"units {self._seed} {data_pass}"))
        first = int(self._order[1][unit_index]) * self._samples_per_unit
        return first, min(first + self._samples_per_unit, self.num_samples)

    def samples(self, data_pass: int, unit_index: int, start: int, count: int) -> Bytes:
        """Return samples `[start, start + count)` of a unit in its shuffled order, shape `(count, L + 1)`.

        Raises `IndexError` beyond the unit's end. A unit is read as a whole at the first touch and kept until another
        one is asked for.
        """
        if self._unit is None or self._unit[:2] != (data_pass, unit_index):
            self._unit = (data_pass, unit_index, self._read_unit(data_pass, unit_index))
        rows = self._unit[2]
        if not 0 <= start <= start + count <= len(rows):
            raise IndexError(f"samples [{start}, {start + count}) of a unit with {len(rows)}")
        return rows[start : start + count]

    def _read_unit(self, data_pass: int, unit_index: int) -> Bytes:
        first, stop = self.unit_range(data_pass, unit_index)
        stream = self._training.read(first * self._length, stop * self._length + 1)
        rows = np.lib.stride_tricks.sliding_window_view(stream, self._length + 1)[:: self._length]
        return rows[permutation(stop - first, f"samples {self._seed} {data_pass} {unit_index}")]

    def held_out(self, tokens: int) -> Bytes:
        """Return about `tokens` held-out tokens (at least one sample), evenly spread, shape `(samples, L + 1)`."""
        count = min(self._num_held_out, max(1, tokens // self._length))
        starts = [i * self._num_held_out // count * self._length for i in range(count)]
        return np.stack([self._held_out.read(start, start + self._length + 1) for start in starts])

    def fingerprint(self) -> str:
        """Return a hash by which other training or held-out text is noticed; reads a few MiB of either."""
        return hashlib.sha256(self._training.digest() + self._held_out.digest()).hexdigest()


def permutation(count: int, key: str) -> npt.NDArray[np.int64]:
    """Return `0 .. count - 1` in an order that depends on `key` alone, on every machine."""
    drawn = np.frombuffer(hashlib.shake_256(key.encode()).digest(8 * count), "<u8")
    return np.argsort(drawn, kind="stable").astype(np.int64)


def find_files(root: str, patterns: tuple[str, ...], key: str) -> list[str]:
    """Return the real paths of all files that match, each once, sorted by their path below `root`.

    Raises `ConfigError` naming `key` for a pattern without a match.
    """
    found: dict[str, str] = {}
    for pattern in patterns:
        paths = [os.path.join(root, name) for name in glob.glob(pattern, root_dir=root, recursive=True)]
        files = [path for path in paths if os.path.isfile(path)]
        if not files:
            raise ConfigError(
                f'[data] {key}: "{pattern}" matches no file below {os.path.abspath(root)}; correct the pattern or put '
                "the files there (patterns are relative to the directory of the spec)"
            )
        for path in files:
            # Two patterns, or a link, may lead to one file; the smallest of its names gives its place.
            name = os.path.relpath(path, root).replace(os.sep, "/")
            real = os.path.realpath(path)
            found[real] = min(name, found.get(real, name))
    return sorted(found, key=lambda real: found[real])


def split_files(root: str, data: DataConfig) -> tuple[list[Span], list[Span]]:
    """Return the training spans and the held-out spans, which have no byte in common.

    With `held_out_files` those files are held out whole, also when a training pattern matches them; else the last
    `held_out_fraction` of every file is.
    """
    training = [(path, os.path.getsize(path)) for path in find_files(root, data.files, "files")]
    if data.held_out_files:
        held_out = find_files(root, data.held_out_files, "held_out_files")
        kept = set(held_out)
        return (
            [Span(path, 0, size) for path, size in training if path not in kept],
            [Span(path, 0, os.path.getsize(path)) for path in held_out],
        )
    cuts = [(path, size - int(size * data.held_out_fraction), size) for path, size in training]
    return [Span(path, 0, cut) for path, cut, _ in cuts], [Span(path, cut, size) for path, cut, size in cuts]


def _samples_in(stream: ByteStream, length: int, what: str) -> int:
    if len(stream) <= length:
        raise ConfigError(
            f"{what} {len(stream)} bytes; one sample needs {length + 1}: add text or lower inner.sequence_length"
        )
    return (len(stream) - 1) // length


def _read_file(span: Span) -> bytes:
    try:
        with open(span.path, "rb") as file:
            file.seek(span.start)
            data = file.read(span.stop - span.start)
    except OSError as error:
        raise ConfigError(f"cannot read the data file {span.path} ({error})") from error
    if len(data) != span.stop - span.start:
        raise ConfigError(f"{span.path} became shorter while the run used it; data files must not change during a run")
    return data
