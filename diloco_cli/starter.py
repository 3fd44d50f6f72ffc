"""`diloco init`: a run spec to start from and a small text, so that the next command trains something."""

from __future__ import annotations

from pathlib import Path

from diloco_cli.resources import find
from diloco_runtime.errors import ConfigError
from diloco_runtime.keys import is_run_name

SPEC_NAME = "run.toml"
TEMPLATE_NAME = 'name = "my-run" '
"""The text of the template in whose place the name of the folder goes, when that can name a run."""


def write_starter(place: str) -> list[str]:
    """Write the starter to a folder or file; return what to say. Raises `ConfigError` rather than replace a spec."""
    target = Path(place).expanduser()
    spec = target if target.suffix == ".toml" else target / SPEC_NAME
    text = spec.parent / "sonnets.txt"
    if spec.exists():
        raise ConfigError(f"{spec} exists already; remove it, or name another file: diloco init FILE.toml")
    try:
        spec.parent.mkdir(parents=True, exist_ok=True)
        _create(spec, _named(find("templates/local.toml").read_text(), spec))
        if not text.exists():
            _create(text, find("templates/sonnets.txt").read_text())
    except OSError as error:
        raise ConfigError(f"cannot write {spec}: {error.strerror or error}; choose another place") from error
    return [f"wrote {spec} and {text}", f"next: diloco train {spec}"]


def _create(path: Path, text: str) -> None:
    with path.open("x") as file:
        file.write(text)


def _named(template: str, spec: Path) -> str:
    """Name the run after the spec's file, or after its folder when the file has the usual name."""
    name = spec.stem if spec.name != SPEC_NAME else spec.absolute().parent.name
    if not is_run_name(name):
        return template
    return template.replace(TEMPLATE_NAME, f'name = "{name}"'.ljust(len(TEMPLATE_NAME) - 1) + " ", 1)
