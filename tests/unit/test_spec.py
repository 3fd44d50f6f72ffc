"""The run spec: what is accepted, and that everything else is refused with file, table, key and remedy."""

import re
from pathlib import Path

import pytest

from diloco_cli.errors import SpecError
from diloco_cli.spec import Spec, load_spec
from diloco_runtime.errors import ConfigError
from diloco_runtime.store import open_store

GOOD = """
[run]
name = "demo"
store = "file://./bb"
tokens = 1_000

[data]
files = ["a.txt"]

[islands.north]
[islands.south]
batch_size = 4
threads = 2
"""


def load(tmp_path: Path, text: str) -> Spec:
    path = tmp_path / "demo.toml"
    path.write_text(text)
    return load_spec(path)


def problems(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        load(tmp_path, text)
    assert all(line.startswith("demo.toml: ") for line in caught.value.problems)
    return [line.removeprefix("demo.toml: ") for line in caught.value.problems]


def test_a_good_spec_is_resolved(tmp_path: Path) -> None:
    spec = load(tmp_path, GOOD)
    assert spec.store == f"file://{tmp_path.resolve()}/bb"
    assert spec.name == "demo" and spec.root == tmp_path and spec.config.tokens == 1000
    assert spec.island_names == ("north", "south")
    north, south = spec.islands
    assert (north.batch_size, north.threads) == (16, 1), "taken from [inner]"
    assert (south.batch_size, south.threads) == (4, 2), "the island's own"
    assert spec.provider.max_restarts == 5


def test_quorum_of_all_becomes_the_number_of_islands(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD + '[sync]\nmin_quorum = "all"').config.sync.min_quorum == 2
    diloco = load(tmp_path, GOOD + '[sync]\npreset = "diloco"').config
    assert diloco.sync.min_quorum == 2 and diloco.outer.merge == "mean" and diloco.outer.momentum == 0.9


def test_what_open_store_recommends_for_a_run_is_what_a_spec_takes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store("az://bucket", "demo")
    said = str(caught.value)
    recommended = re.findall(r"\w+://[\w/]+", said.split("a run needs ")[1].split(". ")[0])
    assert recommended == ["s3://bucket/folder", "gs://bucket/folder", "file:///absolute/folder"]
    for url in recommended:
        assert load(tmp_path, GOOD.replace("file://./bb", url)).store == url
    (refused,) = re.findall(r"(memory://\w+) [^:]*: for tests and benches, not for a spec", said)
    assert "lives inside one process" in problems(tmp_path, GOOD.replace("file://./bb", refused))[0]


def test_an_absolute_store_stays_and_a_home_folder_is_expanded(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD.replace("file://./bb", "file:///srv/bb")).store == "file:///srv/bb"
    assert load(tmp_path, GOOD.replace("file://./bb", "file://~/bb")).store == f"file://{Path.home().resolve()}/bb"


@pytest.mark.parametrize(
    ("added", "table_and_key", "remedy"),
    [
        ("[sync]\nsync_evry = 3", "[sync] sync_evry: unknown key", "did you mean sync_every?"),
        ("[sync]\nbatch_size = 3", "[sync] batch_size: unknown key", "it belongs to [inner] or [islands.NAME]"),
        ("[sync]\nmomentun = 0.1", "[sync] momentun: unknown key", "did you mean momentum in [outer]?"),
        ("[outer]\nzzz = 1", "[outer] zzz: unknown key", "known keys are lr, momentum, merge, weight"),
        ("[iner]\nlr = 1.0", "iner: unknown key", "did you mean inner?"),
        ('[inner]\nbatch_size = "16"', '[inner] batch_size = "16": must be a whole number', "Samples per inner step"),
        ("[inner]\nthreads = true", "[inner] threads = true: must be a whole number", "CPU threads"),
        ('[inner]\nprecision = "fp64"', '[inner] precision = "fp64": must be "fp32" or "bf16"', "Autocast dtype"),
        ("[inner]\nbetas = [0.9]", "[inner] betas = [0.9]: has too few items", ""),
        ("[inner]\nlr = nan", "[inner] lr: nan and inf are no settings", "write a number"),
        ('[sync]\nmin_quorum = "x"', '[sync] min_quorum = "x": must be a whole number or "all"', "Fewest islands"),
        ("[sync]\nmin_quorum = 3", "[sync] min_quorum = 3: more than the 2 islands", "lower it"),
        ("[sync]\nin_flight = 7", "[sync] in_flight = 7 is more than fragments = 6", "lower in_flight"),
        ("[model]\nwidth = 30", "[model] width = 30 is not a multiple of heads = 4", "change one of them"),
        ('[provider]\nkind = "skypilot"', '[provider] kind = "skypilot": this version has', 'write kind = "local"'),
        ('[store]\nregion = "auto"', "[store] region: for s3:// and gs:// only", "remove it"),
        ('[store]\nendpont = "x"', "[store] endpont: unknown key", "did you mean endpoint?"),
        ('[provider]\nkind = "x"', '[provider] kind = "x": there is no such provider', 'write kind = "local"'),
        ("[islands.North]", "[islands.north] and [islands.North] name one island twice", "rename one"),
        ("[islands.a_b]", '[islands.a_b]: "a_b" is not a valid name', "lower-case letters, digits and dashes"),
        ("[islands.x]\nbatch_size = 0", "[islands.x] batch_size = 0: must be greater than or equal to 1", "Samples"),
        ("[islands.x]\nlr = 0.1", "[islands.x] lr: unknown key", "it belongs to [inner] or [outer]"),
    ],
)
def test_one_wrong_key_is_named_with_its_remedy(tmp_path: Path, added: str, table_and_key: str, remedy: str) -> None:
    (line,) = problems(tmp_path, f"{GOOD}\n{added}\n")
    assert line.startswith(table_and_key)
    assert remedy in line


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("tokens = 1_000", "tokens = 0", "[run] tokens = 0: must be greater than 0 (The budget"),
        ("tokens = 1_000", "", "[run] tokens: missing; add it (The budget"),
        ('name = "demo"', 'name = "../demo"', '[run] name = "../demo": not a valid name; use 1 to 40 characters'),
        ('name = "demo"', 'name = ""', '[run] name = "": not a valid name'),
        ("file://./bb", "memory://x", "a memory store lives inside one process"),
        (
            "file://./bb",
            "az://bucket/x",
            "no such kind of store; write s3://bucket/folder, gs://bucket/folder or file:",
        ),
        ("file://./bb", "s3://", '[run] store = "s3://": names no bucket; write s3://bucket/folder'),
        ("file://./bb", "s3://bucket/x?region=a", '[run] store = "s3://bucket/x?...": options belong into the table'),
        ("file://./bb", "./bb", "not a URL; for a folder on this machine write file://./bb"),
        ("file://./bb", "file://", "names no folder"),
        ('files = ["a.txt"]', "", 'data.files is empty; a "gpt" model needs text files'),
        ('files = ["a.txt"]', 'files = "a.txt"', '[data] files = "a.txt": must be a list: [...]'),
        ("tokens = 1_000", "tokens = = 1", "line 5: not valid TOML: Invalid value: `tokens = = 1`"),
        ("tokens = 1_000", "tokens = 1\ntokens = 2", "line 6: `tokens = 2` gives a key a second time"),
        ("[islands.south]", "[islands.north]", "table [islands.north] stands twice: two islands cannot share the name"),
    ],
)
def test_a_wrong_value_in_place_of_a_good_one(tmp_path: Path, old: str, new: str, said: str) -> None:
    (line,) = problems(tmp_path, GOOD.replace(old, new))
    assert said in line


def test_all_problems_of_a_file_are_reported_at_once(tmp_path: Path) -> None:
    text = GOOD.replace("1_000", "0").replace('"demo"', '"Demo"') + "[inner]\nlr = -1.0\nbatch = 3\n[islands.B]\n"
    said = problems(tmp_path, text)
    for part in ("[run] tokens = 0", '[run] name = "Demo"', "[inner] lr = -1.0", "[inner] batch: unkn", "[islands.B]"):
        assert any(line.startswith(part) for line in said), part


def test_a_spec_without_islands_is_refused(tmp_path: Path) -> None:
    base = GOOD[: GOOD.index("[islands")]
    assert any("table [islands]: missing" in line for line in problems(tmp_path, base))
    assert any("no islands: add at least one table" in line for line in problems(tmp_path, base + "[islands]\n"))


def test_a_missing_file_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no such file; `diloco init` writes one"):
        load_spec(tmp_path / "absent.toml")


def test_a_binary_file_is_no_spec(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="cannot be read as a text file"):
        load_spec(tmp_path / "x.toml")
