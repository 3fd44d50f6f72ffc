"""The README says what the code does: commands, options, exit codes, defaults, presets, files, targets, links."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from diloco_cli.app import app
from diloco_cli.assumptions import IslandAssumptions, SimulateTable
from diloco_cli.exit_codes import MEANINGS
from diloco_cli.spec import IslandTable, ProviderTable, RunTable, Spec, load_spec
from diloco_cli.spec_store import StoreTable
from diloco_runtime.config import DataConfig, InnerConfig, ModelConfig, OuterConfig, SyncConfig

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
TABLES = {
    "run": RunTable,
    "store": StoreTable,
    "model": ModelConfig,
    "data": DataConfig,
    "inner": InnerConfig,
    "outer": OuterConfig,
    "sync": SyncConfig,
    "provider": ProviderTable,
    "simulate": SimulateTable,
    "islands.north": IslandTable,
}
MODULES = ("diloco_cli", "runtime/diloco_runtime", "examples", "bench")
"""Folders whose modules are all named in the file map, one by one."""


def section(title: str) -> str:
    """Return what stands between a heading and the next one of the same or a higher rank."""
    found = re.search(rf"^(#+) {re.escape(title)}\n", README, re.M)
    assert found is not None, f"the README has no section {title!r}"
    rest = README[found.end() :]
    code = [block.span() for block in re.finditer(r"^```.*?^```", rest, re.M | re.S)]
    for end in re.finditer(rf"^#{{1,{len(found[1])}}} ", rest, re.M):
        if not any(start < end.start() < stop for start, stop in code):
            return rest[: end.start()]
    return rest


def block(text: str, kind: str) -> str:
    """Return the contents of the one code block of a kind."""
    found = re.findall(rf"^```{kind}\n(.*?)^```", text, re.M | re.S)
    assert len(found) == 1
    return str(found[0])


def rows(text: str, header: str) -> list[list[str]]:
    """Return the cells of the table whose first column has this header."""
    found = re.search(rf"^\| {re.escape(header)} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.M)
    assert found is not None, f"no table {header!r}"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].splitlines()]


def code_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# ---- commands -------------------------------------------------------------------------------------------------------


def real_commands() -> dict[str, dict[str, Any]]:
    """Return the options of every command by each of their names."""
    group = typer.main.get_command(app)
    return {
        name: {flag: option for option in command.params if is_shown(option) for flag in option.opts}
        for name, command in group.commands.items()  # type: ignore[attr-defined]
    }


def is_shown(parameter: Any) -> bool:
    return parameter.param_type_name == "option" and not parameter.hidden


def documented_commands() -> Iterator[tuple[str, list[str], str]]:
    command = ""
    for first, option, does in rows(section("Commands"), "command"):
        if first:
            command = code_in(first)[0].split()[1]
        yield command, code_in(option), does


def test_every_command_and_option_is_documented_and_exists() -> None:
    documented: dict[str, list[str]] = {}
    for command, options, _ in documented_commands():
        documented.setdefault(command, []).extend(options)
    real = {name: sorted(options) for name, options in real_commands().items()}
    assert {name: sorted(options) for name, options in documented.items()} == real


def test_defaults_of_options_are_true() -> None:
    real, seen = real_commands(), 0
    for command, options, does in documented_commands():
        default = real[command][options[0]].default if options else None
        is_number = isinstance(default, int | float) and not isinstance(default, bool)
        said = re.search(r"\(default (\S+)\)", does)
        assert (said is not None) == is_number, f"{command} {options}"
        if said is not None:
            seen += 1
            assert said[1] == str(default), f"{command} {options}"
    assert seen > 0


def test_arguments_of_commands_exist() -> None:
    group = typer.main.get_command(app)
    for first, _, _ in rows(section("Commands"), "command"):
        if not first:
            continue
        _, name, *arguments = code_in(first)[0].split()
        params = group.commands[name].params  # type: ignore[attr-defined]
        assert len(arguments) == sum(p.param_type_name == "argument" for p in params), first
        assert all(a.startswith("[") for a in arguments), "every argument has a default"


def test_the_exit_codes_are_those_of_the_command_line() -> None:
    documented = {int(code): meaning for code, meaning in rows(section("Commands"), "exit code")}
    assert documented == {int(code): meaning for code, meaning in MEANINGS.items()}


def test_commands_in_the_text_exist() -> None:
    real = real_commands()
    used = re.findall(r"^    diloco (\S+)([^#\n]*)", README, re.M)
    used += re.findall(r"`(?:\.venv/bin/)?diloco ([a-z]+)([^`]*)`", README)
    assert {"init", "train", "status", "down"} <= {command for command, _ in used}
    for command, arguments in used:
        assert command in real
        for option in re.findall(r"(?<!\S)--?[a-z][a-z-]*", arguments):
            assert option in real[command], f"diloco {command} {option}"


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):.*##", (ROOT / "Makefile").read_text(), re.M))
    documented = {name.split()[1] for target, _ in rows(section("Development"), "target") for name in code_in(target)}
    assert documented == targets - {"help", "venv"}
    for named in re.findall(r"(?:`|^    )make ((?:[A-Z]+=\S+ )?[a-z0-9-]+)", README, re.M):
        assert named.split()[-1] in targets


# ---- the spec -------------------------------------------------------------------------------------------------------


def spec_text() -> str:
    return block(section("The spec"), "toml")


def load(folder: Path, text: str) -> Spec:
    path = folder / "run.toml"
    path.write_text(text)
    return load_spec(path)


def minimal(extra: str = "") -> str:
    """Return the README's spec without anything that has a default."""
    given = tomllib.loads(spec_text())
    run = "\n".join(f"{key} = {given['run'][key]!r}" for key in ("name", "store", "tokens"))
    islands = "\n".join(f"[islands.{name}]" for name in given["islands"])
    return f"[run]\n{run}\n[data]\nfiles = {given['data']['files']!r}\n{extra}\n{islands}\n"


def test_the_spec_loads_and_shows_the_true_defaults(tmp_path: Path) -> None:
    shown, bare = load(tmp_path, spec_text()), load(tmp_path, minimal())
    assert shown == bare


def test_the_spec_shows_every_key_in_its_table() -> None:
    given = tomllib.loads(spec_text())
    parts = re.split(r"^\[([\w.]+)\]", spec_text(), flags=re.M)
    text = dict(zip(parts[1::2], parts[2::2], strict=True))
    tables = {name for name in text if not name.startswith("islands.")} | {"islands.north"}
    assert tables == TABLES.keys()
    for table, model in TABLES.items():
        active = given["islands"]["north"] if table == "islands.north" else given[table]
        hidden = set(re.findall(r"^# (?:(\w+) =|\[[\w.]+\.(\w+)\])", text[table], re.M))
        hidden = {key or subtable for key, subtable in hidden}
        assert active.keys() | hidden == model.model_fields.keys(), f"[{table}]"
        assert not active.keys() & hidden
        for key in hidden:
            # What TOML cannot say: absent.
            default = model.model_fields[key].get_default(call_default_factory=True)
            assert default in (None, {}, IslandAssumptions()), f"[{table}] {key}"


def test_the_presets_are_those_of_the_code(tmp_path: Path) -> None:
    header = re.search(r"^\| key \|(.*)\|$", section("Presets"), re.M)
    assert header is not None
    names = code_in(header[1])
    specs = [load(tmp_path, minimal(f'[sync]\npreset = "{name}"')) for name in names]
    documented = {code_in(key)[0]: values for key, *values in rows(section("Presets"), "key")}
    for key, values in documented.items():
        table, _, name = key.rpartition(".")
        for spec, said in zip(specs, values, strict=True):
            assert said == written(getattr(getattr(spec.config, table or "sync"), name), name, spec), f"{key}: {said}"
    assert documented.keys() == differing(specs)


def differing(specs: list[Spec]) -> set[str]:
    """Return the keys in which presets differ."""
    found = set()
    for table, prefix in (("sync", ""), ("outer", "outer.")):
        dumps = [getattr(spec.config, table).model_dump(exclude={"preset"}) for spec in specs]
        found |= {prefix + key for key in dumps[0] if any(dump[key] != dumps[0][key] for dump in dumps)}
    return found


def written(value: Any, name: str, spec: Spec) -> str:
    """Return a value as the table of presets writes it."""
    if name == "min_quorum" and value == len(spec.islands):
        return "all"
    return "absent" if value is None else str(value).lower()


# ---- files and links ------------------------------------------------------------------------------------------------


def file_map() -> list[str]:
    """Return every path that the file map names."""
    found, folder = [], ""
    for line in block(section("File map"), "").splitlines():
        if not line:
            continue
        name, what = line.split(maxsplit=1)
        if line.startswith("  "):
            found.append(folder + name)
            continue
        found.append(name)
        folder = name if name.endswith("/") else ""
        files = re.findall(r"[\w-]+\.\w+(?=[,;\s]|$)", what) if folder else []
        found += [folder + file for file in files]
    return found


def test_every_file_in_the_map_exists_and_is_named_once() -> None:
    named = file_map()
    assert [name for name in named if not (ROOT / name).exists()] == []
    assert [name for name in named if name.endswith("/") != (ROOT / name).is_dir()] == []
    assert len(named) == len(set(named))


def test_every_module_is_in_the_map() -> None:
    modules = {path.relative_to(ROOT).as_posix() for folder in MODULES for path in (ROOT / folder).rglob("*.py")}
    shown = {module for module in modules if not (module.startswith("bench/_"))}
    assert shown - set(file_map()) == set()


def test_every_kind_of_test_is_in_the_map() -> None:
    kinds = {f"tests/{path.name}/" for path in (ROOT / "tests").iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert kinds <= set(file_map())


def anchors() -> set[str]:
    titles = re.findall(r"^#+ (.*)$", README, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


LINKS = sorted(set(re.findall(r"\]\((?!https://)([^)\s]+)\)", README)))
"""Links within the repository; other people's pages are not ours to test."""


@pytest.mark.parametrize("link", LINKS)
def test_local_links_resolve(link: str) -> None:
    if link.startswith("#"):
        assert link[1:] in anchors()
    else:
        assert (ROOT / link).is_file()


def test_no_line_is_too_long() -> None:
    written_by_hand = README
    for measured in ("What the demo prints", "What it costs"):  # output of programs is as wide as it is
        written_by_hand = written_by_hand.replace(section(measured), "")
    assert [line for line in written_by_hand.splitlines() if len(line) > 120] == []
