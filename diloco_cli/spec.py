"""The run spec: one TOML file, read whole, refused whole with every problem named.

`load_spec` is the only way in. It reads the file and nothing else: whether the store answers and whether data files
exist is looked at by the commands that need them.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from diloco_cli import spec_problems
from diloco_cli.assumptions import IslandAssumptions, SimulateTable, of_island
from diloco_cli.errors import SpecError
from diloco_cli.spec_store import StoreTable, heartbeat_problems, resolve_store
from diloco_runtime.config import DataConfig, InnerConfig, ModelConfig, OuterConfig, RunConfig, Settings, SyncConfig
from diloco_runtime.keys import is_island_name, is_run_name
from diloco_runtime.store import without_options

NAME_RULE = "1 to 40 characters: lower-case letters, digits and dashes, a letter first, no dash last"
TRAINING_TABLES = ("model", "data", "inner", "outer", "sync")


class RunTable(Settings):
    """Which run, where, how long."""

    name: str
    """Name of the run: the folder on the blackboard and the prefix of everything that is started for it."""
    store: str
    """Folder of the blackboard as a URL: s3://bucket/folder, gs://bucket/folder, file:///absolute/path, or
    file://./path relative to the spec."""
    tokens: int = Field(gt=0)
    """The budget: tokens merged into the global model, whoever trained them."""
    seed: int = Field(0, ge=0)
    """Seed of the initial parameters and of the order of the data."""


class ProviderTable(Settings):
    """Where islands come from, and how patiently they are kept alive."""

    kind: str = "local"
    """"local": islands are processes of this machine."""
    max_restarts: int = Field(5, ge=0)
    """Crashes of one island after which it is given up; ten minutes without a crash start the count anew."""
    relaunch_after: float = Field(2.0, ge=0)
    """Seconds before a dead island is launched again; doubled with each death in a row, up to 60."""
    replace_frozen_after: float = Field(120.0, gt=0)
    """Seconds a whole island may stand still, its processes present, before it is killed and launched again."""
    stalled_after: float = Field(3600.0, gt=0)
    """Seconds after which an island that got into no commit is given up, and a run without a commit is stopped."""


class IslandTable(Settings):
    """One island; what is absent is taken from [inner]."""

    batch_size: int | None = Field(None, ge=1)
    """Samples per inner step on this island."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of this island's learner."""
    simulate: IslandAssumptions = IslandAssumptions()
    """What `diloco simulate` assumes of this island; what is absent is taken from [simulate]."""


class SpecFile(Settings):
    """The shape of the file."""

    run: RunTable
    """[run]: name, store and tokens are required."""
    store: StoreTable = StoreTable()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    inner: InnerConfig = InnerConfig()
    outer: OuterConfig = OuterConfig()
    sync: SyncConfig = SyncConfig()
    provider: ProviderTable = ProviderTable()
    simulate: SimulateTable = SimulateTable()
    islands: dict[str, IslandTable]
    """[islands.NAME]: one table per island, at least one."""


@dataclass(frozen=True)
class Island:
    """One island as it is launched."""

    name: str
    batch_size: int
    threads: int
    assumed: IslandAssumptions = IslandAssumptions()
    """What `diloco simulate` takes it for."""


@dataclass(frozen=True)
class Spec:
    """A spec that can be used: every name valid, every default filled, every path absolute."""

    path: Path
    store: str
    """URL with everything that opens the store; see `place` for what people are shown."""
    config: RunConfig
    provider: ProviderTable
    islands: tuple[Island, ...]
    simulate: SimulateTable = SimulateTable()
    """Assumptions of `diloco simulate` alone."""

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def place(self) -> str:
        """The store as messages call it: without options."""
        return without_options(self.store)

    @property
    def root(self) -> Path:
        """Directory that file names and custom modules of the spec are relative to."""
        return self.path.parent

    @property
    def island_names(self) -> tuple[str, ...]:
        return tuple(island.name for island in self.islands)


def load_spec(path: str | Path) -> Spec:
    """Read and check a spec; raise `SpecError` with every problem found, one line each."""
    path = Path(path).expanduser().absolute()
    raw = _read_toml(path)
    problems = spec_problems.non_finite(raw)
    file: SpecFile | None = None
    try:
        file = SpecFile.model_validate(_with_tuples(raw), strict=True)
    except ValidationError as error:
        problems += spec_problems.describe(error, SpecFile, raw)
    problems += _name_problems(raw)
    store, store_problems = resolve_store(_table(raw, "run"), _table(raw, "store"), path.parent)
    problems += store_problems
    if file is not None:
        problems += _provider_problems(file.provider) + _quorum_problems(file)
        problems += heartbeat_problems(store, file.sync.heartbeat_every)
    config = None if problems or file is None else _resolve_config(file, raw, problems)
    if config is None or file is None:
        raise SpecError([f"{path.name}: {problem}" for problem in problems])
    return Spec(path, store, config, file.provider, _islands(file, config), file.simulate)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError as error:
        raise SpecError([f"{path}: no such file; `diloco init` writes one to start from"]) from error
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError([f"{path}: cannot be read as a text file ({error})"]) from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError([f"{path.name}: {spec_problems.describe_syntax(str(error), text)}"]) from error


def _with_tuples(value: Any) -> Any:
    """Copy parsed TOML with tuples for lists: strict validation, which refuses "16" for 16, takes no list for one."""
    if isinstance(value, dict):
        return {key: _with_tuples(item) for key, item in value.items()}
    return tuple(_with_tuples(item) for item in value) if isinstance(value, list) else value


def _table(raw: dict[str, Any], name: str) -> dict[str, Any]:
    table = raw.get(name)
    return table if isinstance(table, dict) else {}


def _name_problems(raw: dict[str, Any]) -> list[str]:
    problems = []
    name = _table(raw, "run").get("name")
    if isinstance(name, str) and not is_run_name(name):
        problems.append(f'[run] name = "{name}": not a valid name; use {NAME_RULE}')
    islands = _table(raw, "islands")
    if isinstance(raw.get("islands"), dict) and not islands:
        problems.append("no islands: add at least one table, for example [islands.a]")
    seen: dict[str, str] = {}
    for island in islands:
        twin = seen.setdefault(island.lower(), island)
        if twin != island:
            problems.append(
                f"[islands.{twin}] and [islands.{island}] name one island twice (upper and lower case do "
                "not count): rename one"
            )
        elif not is_island_name(island):
            problems.append(f'[islands.{island}]: "{island}" is not a valid name; use {NAME_RULE}')
    return problems


def _provider_problems(provider: ProviderTable) -> list[str]:
    if provider.kind == "local":
        return []
    what = "this version has only local islands" if provider.kind == "skypilot" else "there is no such provider"
    return [f'[provider] kind = "{provider.kind}": {what}; write kind = "local"']


def _quorum_problems(file: SpecFile) -> list[str]:
    quorum, islands = file.sync.min_quorum, len(file.islands)
    if isinstance(quorum, str) or quorum <= islands:
        return []
    count = "1 island" if islands == 1 else f"{islands} islands"
    return [
        f"[sync] min_quorum = {quorum}: more than the {count} of this spec, so that no merge could ever have "
        'it; lower it, write "all", or add islands'
    ]


def _resolve_config(file: SpecFile, raw: dict[str, Any], problems: list[str]) -> RunConfig | None:
    """Fill the defaults that depend on other tables; add to `problems` what only the whole shows to be wrong."""
    tables = {name: _table(raw, name) for name in TRAINING_TABLES}
    if file.sync.min_quorum == "all":
        tables["sync"] = {**tables["sync"], "min_quorum": len(file.islands)}
    try:
        return RunConfig(name=file.run.name, tokens=file.run.tokens, seed=file.run.seed, **tables)
    except ValidationError as error:
        problems += spec_problems.describe(error, SpecFile, raw)
        return None


def _islands(file: SpecFile, config: RunConfig) -> tuple[Island, ...]:
    return tuple(
        Island(
            name,
            table.batch_size or config.inner.batch_size,
            table.threads or config.inner.threads,
            of_island(file.simulate, table.simulate),
        )
        for name, table in file.islands.items()
    )
