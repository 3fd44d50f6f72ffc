"""What is wrong with a spec, in a person's words: file, table, key, and what to do about it. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

_WORDS = {
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "string_type": 'must be text in quotes: "..."',
    "bool_type": "must be true or false",
    "tuple_type": "must be a list: [...]",
    "dict_type": "must be a table",
    "model_type": "must be a table",
    "model_attributes_type": "must be a table",
}
_REPEATED_TABLE = re.compile(r"Cannot declare \((.*?)\) twice.*line (\d+)")
_REPEATED_KEY = re.compile(r"Cannot overwrite a value.*line (\d+)")


def describe_syntax(message: str, text: str) -> str:
    """Translate what `tomllib` says about `text`: duplicates into names, the rest with the line it stopped at."""
    if found := _REPEATED_TABLE.search(message):
        names = re.findall(r"'([^']*)'", found[1])
        what = f"line {found[2]}: table [{'.'.join(names)}] stands twice"
        if names[:1] == ["islands"] and len(names) == 2:
            return f"{what}: two islands cannot share the name {names[1]!r}; rename one"
        return f"{what}; put all its keys into one table"
    if found := _REPEATED_KEY.search(message):
        line = text.splitlines()[int(found[1]) - 1].strip()
        return f"line {found[1]}: `{line}` gives a key a second time, or a name that a table has; remove or rename one"
    reason, _, place = message.rpartition(" (at ")
    if found := re.search(r"line (\d+)", place):
        line = text.splitlines()[int(found[1]) - 1].strip()
        return f"line {found[1]}: not valid TOML: {reason}: `{line}`"
    return f"not valid TOML: {message}"


def non_finite(raw: dict[str, Any], prefix: tuple[str, ...] = ()) -> list[str]:
    """Name every `nan` and `inf` in parsed TOML: no setting can mean anything by them."""
    problems = []
    for key, value in raw.items():
        if isinstance(value, dict):
            problems += non_finite(value, (*prefix, key))
        elif any(_is_non_finite(item) for item in (value if isinstance(value, list) else [value])):
            problems.append(f"{place((*prefix, key))}: nan and inf are no settings; write a number")
    return problems


def _is_non_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def describe(error: ValidationError, shape: type[BaseModel], raw: dict[str, Any]) -> list[str]:
    """Return one line per wrong key, in the order of the file's schema."""
    by_place: dict[tuple[str, ...], list[ErrorDetails]] = {}
    for detail in error.errors():
        if _is_non_finite(detail["input"]):
            continue  # named by `non_finite` already
        by_place.setdefault(_path(detail, raw), []).append(detail)
    return [_line(path, details, shape, raw) for path, details in by_place.items()]


def place(path: tuple[str, ...]) -> str:
    """Write a path as a person finds it in the file: `[table] key`."""
    return f"[{'.'.join(path[:-1])}] {path[-1]}" if len(path) > 1 else path[0]


def _path(detail: ErrorDetails, raw: dict[str, Any]) -> tuple[str, ...]:
    """Return the keys that lead to the error, without what pydantic appends for branches of a union and items."""
    path: list[str] = []
    value: Any = raw
    for part in detail["loc"]:
        if not isinstance(value, dict) or (part not in value and detail["type"] != "missing"):
            break
        path.append(str(part))
        value = value.get(part)
    return tuple(path)


def _line(path: tuple[str, ...], details: list[ErrorDetails], shape: type[BaseModel], raw: dict[str, Any]) -> str:
    first = details[0]
    if first["type"] == "value_error":  # our own cross-field messages: they name the keys and the remedy themselves
        table = f"[{'.'.join(path)}] " if path else ""
        return f"{table}{first['msg'].removeprefix('Value error, ')}"
    if first["type"] == "extra_forbidden":
        return f"{place(path)}: unknown key{_suggest(path, shape)}"
    field = _field(path, shape)
    doc = f" ({_one_line(field.description)})" if field is not None and field.description else ""
    if first["type"] == "missing" and len(path) == len(first["loc"]):
        what = f"table [{path[0]}]" if len(path) == 1 else place(path)
        return f"{what}: missing; add it{doc}"
    said = " or ".join(dict.fromkeys(_words(detail) for detail in details)).replace(" or must be ", " or ")
    value = _value(path, raw)
    shown = "" if isinstance(value, dict) else f" = {_toml(value)}"
    return f"{place(path)}{shown}: {said}{doc}"


def _words(detail: ErrorDetails) -> str:
    if detail["type"] in _WORDS:
        return _WORDS[detail["type"]]
    if detail["type"] == "missing":
        return "has too few items"
    text = detail["msg"].replace("Input should be", "must be").replace("'", '"')
    return text[0].lower() + text[1:]


def _one_line(doc: str) -> str:
    return " ".join(doc.split()).rstrip(".")


def _value(path: tuple[str, ...], raw: dict[str, Any]) -> Any:
    value: Any = raw
    for part in path:
        value = value[part]
    return value


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def _models(shape: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield every table of the file with its model; `islands.*` stands for the tables of islands, with theirs below."""
    for name, field in shape.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield name, field.annotation
        else:
            for inner in getattr(field.annotation, "__args__", ()):
                if isinstance(inner, type) and issubclass(inner, BaseModel):
                    yield f"{name}.*", inner
                    yield from ((f"{name}.*.{below}", model) for below, model in _models(inner))


def _model_at(table: tuple[str, ...], shape: type[BaseModel]) -> type[BaseModel] | None:
    if not table:
        return shape
    tables = dict(_models(shape))
    return tables.get(".".join(table)) or tables.get(".".join((table[0], "*", *table[2:])))


def _field(path: tuple[str, ...], shape: type[BaseModel]) -> FieldInfo | None:
    model = _model_at(path[:-1], shape)
    return None if model is None else model.model_fields.get(path[-1])


def _suggest(path: tuple[str, ...], shape: type[BaseModel]) -> str:
    """Say which known key was probably meant: one of this table, else one of another table, else list them."""
    *table, key = path
    model = _model_at(tuple(table), shape)
    known = list(model.model_fields) if model is not None else []
    if near := get_close_matches(key, known, 1, 0.6):
        return f"; did you mean {near[0]}?"
    homes = [name for name, other in _models(shape) if key in other.model_fields]
    if homes:
        return f"; it belongs to {' or '.join(f'[{home}]'.replace('.*', '.NAME') for home in homes)}"
    everywhere = {field: name for name, other in _models(shape) for field in other.model_fields}
    if near := get_close_matches(key, list(everywhere), 1, 0.8):
        return f"; did you mean {near[0]} in [{everywhere[near[0]].replace('.*', '.NAME')}]?"
    return f"; known keys are {', '.join(known)}"
