"""Cutting a model into fragments: balanced, the same everywhere, every number exactly once, by clean names."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_runtime.errors import ConfigError, IncompatibleModel
from diloco_runtime.fragments import (
    assemble,
    build_table,
    check_table,
    clean_name,
    embedding_names,
    piece_view,
    read_fragment,
    table_of,
    trained_parameters,
    write_fragment,
)
from diloco_runtime.records import Fragment

Shapes = dict[str, tuple[int, ...]]
SHAPE = st.lists(st.integers(0, 12), max_size=3).map(tuple)
SHAPES = st.dictionaries(st.sampled_from([f"layer{i}.weight" for i in range(12)]), SHAPE, min_size=1)


def pieces(table: tuple[Fragment, ...]) -> list[tuple[str, int, int]]:
    return sorted((piece.name, piece.start, piece.stop) for fragment in table for piece in fragment.pieces)


def sizes(table: tuple[Fragment, ...]) -> list[int]:
    return [fragment.numel for fragment in table]


# ---- the table ------------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(shapes=SHAPES, count=st.integers(1, 6), order=st.randoms(use_true_random=False))
def test_every_row_of_every_tensor_is_in_exactly_one_fragment(shapes: Shapes, count: int, order: random.Random) -> None:
    try:
        table = build_table(shapes, count)
    except ConfigError as error:
        assert f"sync.fragments = {count}" in str(error)
        return
    assert len(table) == count and all(fragment.pieces for fragment in table)
    for name, shape in shapes.items():
        found = [p for fragment in table for p in fragment.pieces if p.name == name]
        found.sort(key=lambda p: p.start)
        assert [p.start for p in found] == [0, *(p.stop for p in found[:-1])]
        assert found[-1].stop == (shape[0] if shape else 1)
        assert all(p.shape == ((p.stop - p.start, *shape[1:]) if shape else ()) for p in found)
    shuffled = list(shapes)
    order.shuffle(shuffled)
    assert build_table({name: shapes[name] for name in shuffled}, count) == table, "the order of names matters"


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 400), st.integers(1, 8)), min_size=1, max_size=12), count=st.integers(1, 8)
)
def test_fragments_are_of_about_equal_size(rows: list[tuple[int, int]], count: int) -> None:
    """Greedy bin packing: no two fragments differ by more than the largest piece, and no piece exceeds its share by
    more than the one row that it cannot be cut below."""
    shapes = {f"w{i:02}": shape for i, shape in enumerate(rows)}
    total, widest = sum(map(math.prod, rows)), max(width for _, width in rows)
    if sum(rows for rows, _ in rows) < count:
        return
    try:
        table = build_table(shapes, count)
    except ConfigError:
        return
    largest = max(piece.numel for fragment in table for piece in fragment.pieces)
    assert largest <= total / count + widest
    assert max(sizes(table)) - min(sizes(table)) <= largest


def test_the_largest_fragment_of_a_realistic_model_is_near_the_mean() -> None:
    shapes: Shapes = {"wte.weight": (256, 256), "ln_f.weight": (256,)}
    for i in range(4):
        shapes |= {f"h{i}.attn.weight": (768, 256), f"h{i}.proj.weight": (256, 256), f"h{i}.fc.weight": (1024, 256)}
        shapes |= {f"h{i}.out.weight": (256, 1024), f"h{i}.ln.weight": (256,), f"h{i}.ln.bias": (256,)}
    total = sum(map(math.prod, shapes.values()))
    for count in (1, 2, 3, 4, 6, 8):
        found = sizes(build_table(shapes, count))
        assert sum(found) == total
        assert max(found) <= 1.15 * total / count, count


def test_a_tensor_larger_than_its_share_is_cut_by_rows() -> None:
    table = build_table({"wte": (10, 4), "w": (2, 4)}, 3)
    assert pieces(table) == [("w", 0, 2), ("wte", 0, 3), ("wte", 3, 6), ("wte", 6, 10)], "what fits is left whole"
    one_row = build_table({"a": (1, 100), "b": (1, 1), "c": ()}, 3)
    assert pieces(one_row) == [("a", 0, 1), ("b", 0, 1), ("c", 0, 1)], "a single row cannot be cut"


def test_ties_go_by_name() -> None:
    table = build_table(dict.fromkeys("dcab", (4,)), 4)
    assert [fragment.pieces[0].name for fragment in table] == ["a", "b", "c", "d"]


def test_what_is_merged_by_the_mean_is_said_in_every_piece() -> None:
    table = build_table({"wte": (9, 4), "w": (4, 4)}, 3, frozenset({"wte"}))
    assert {(p.name, p.merge) for f in table for p in f.pieces} == {("wte", "mean"), ("w", "rda")}


def test_more_fragments_than_pieces_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"sync\.fragments = 4, but the model can be cut into 3 pieces at most"):
        build_table({"a": (2, 2), "b": ()}, 4)


# ---- a model's names ------------------------------------------------------------------------------------------------


class Tied(torch.nn.Module):
    """Token embedding used as the output projection, a frozen tensor, and integers."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = torch.nn.Embedding(6, 4)
        self.body = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.wte.weight
        self.frozen = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_buffer("count", torch.zeros(2))


class Wrapper(torch.nn.Module):
    """What `torch.compile` ("_orig_mod") and DDP ("module") do to names."""

    def __init__(self, inner: torch.nn.Module, name: str) -> None:
        super().__init__()
        self.add_module(name, inner)


def test_tied_embeddings_appear_once_and_frozen_tensors_not_at_all() -> None:
    model = Tied()
    assert sorted(trained_parameters(model)) == ["body.bias", "body.weight", "wte.weight"]
    assert embedding_names(model) == {"wte.weight"}
    table = table_of(model, 2)
    assert sum(sizes(table)) == 6 * 4 + 4 * 4 + 4
    assert {p.merge for f in table for p in f.pieces if p.name == "wte.weight"} == {"mean"}


@pytest.mark.parametrize("wrappers", [["_orig_mod"], ["module"], ["module", "_orig_mod"], ["_orig_mod", "module"]])
def test_wrappers_leave_no_trace(wrappers: list[str]) -> None:
    model: torch.nn.Module = Tied()
    expected = table_of(model, 3)
    for name in wrappers:
        model = Wrapper(model, name)
    assert table_of(model, 3) == expected


def test_wrappers_in_the_middle_leave_no_trace_either() -> None:
    assert clean_name("module.h.0._orig_mod.attn.module.weight") == "h.0.attn.weight"
    assert clean_name("submodule.my_orig_mod.weight") == "submodule.my_orig_mod.weight"


def test_two_parameters_with_one_clean_name_are_refused() -> None:
    model = Wrapper(torch.nn.Linear(2, 2), "module")
    model.register_parameter("weight", torch.nn.Parameter(torch.zeros(2)))
    with pytest.raises(ConfigError, match="two parameters of the model are both called weight"):
        trained_parameters(model)


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="no floating-point parameter that requires a gradient"):
        trained_parameters(torch.nn.ReLU())


# ---- another model than the run's -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mine", "theirs", "says"),
    [
        ({"w": (4, 3)}, {"w": (4, 2)}, r"w\[0:4\] is shape \(4, 3\), merge rda here and shape \(4, 2\), merge rda in"),
        ({"w": (4, 3), "b": (4,)}, {"w": (4, 3)}, r"b\[0:4\] is shape \(4,\), merge rda here and absent in the run"),
        ({"w": (4, 3)}, {"w": (4, 3), "b": (4,)}, r"b\[0:4\] is absent here and shape \(4,\), merge rda in the run"),
        ({"w": (4, 3)}, {"v": (4, 3)}, r"v\[0:4\] is absent here"),
    ],
)
def test_another_model_is_refused_with_its_first_difference(mine: Shapes, theirs: Shapes, says: str) -> None:
    with pytest.raises(IncompatibleModel, match=f"island iowa is not the run's: {says}.*make the code and versions"):
        check_table(build_table(mine, 1), build_table(theirs, 1), "iowa")


def test_another_way_to_merge_and_another_cut_are_refused_too() -> None:
    shapes = {"w": (4, 2), "v": (4, 2)}
    with pytest.raises(IncompatibleModel, match="merge mean here and .* merge rda in the run"):
        check_table(build_table(shapes, 1, frozenset({"w"})), build_table(shapes, 1), "iowa")
    one, two = build_table(shapes, 2)
    with pytest.raises(IncompatibleModel, match="island iowa cuts the same tensors into other fragments"):
        check_table((two, one), (one, two), "iowa")
    check_table((one, two), (one, two), "iowa")


# ---- reading and writing --------------------------------------------------------------------------------------------


def test_reading_copies_and_writing_writes_in_place() -> None:
    model = Tied()
    parameters, table = trained_parameters(model), table_of(model, 4)
    before = {name: p.detach().clone() for name, p in parameters.items()}
    read = [read_fragment(parameters, fragment) for fragment in table]
    for fragment, values in zip(table, read, strict=True):
        assert {key: tuple(v.shape) for key, v in values.items()} == {p.key: p.shape for p in fragment.pieces}
        assert all(not v.requires_grad and v.dtype == torch.float32 for v in values.values())
        write_fragment(parameters, fragment, {key: value + 1 for key, value in values.items()})
    assert all(torch.equal(parameters[name], before[name] + 1) for name in before)
    assert model.head.weight is model.wte.weight and all(p.requires_grad for p in parameters.values())
    joined = assemble(table, dict(enumerate(read)))
    assert joined.keys() == before.keys()
    assert all(torch.equal(joined[name], before[name]) for name in before)


def test_lower_precision_parameters_are_read_as_fp32_and_written_back() -> None:
    parameters = {"w": torch.nn.Parameter(torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16))}
    (fragment,) = build_table({"w": (1, 2)}, 1)
    values = read_fragment(parameters, fragment)
    assert values["w[0:1]"].dtype == torch.float32
    write_fragment(parameters, fragment, {"w[0:1]": values["w[0:1]"] * 2})
    assert parameters["w"].tolist() == [[3.0, -4.0]] and parameters["w"].dtype == torch.bfloat16


def test_pieces_are_views_and_scalars_are_whole() -> None:
    parameters = {"w": torch.arange(12.0).reshape(6, 2), "s": torch.tensor(3.0)}
    table = build_table({"w": (6, 2), "s": ()}, 3)
    views = {p.key: piece_view(parameters, p) for f in table for p in f.pieces}
    assert views["s[0:1]"].shape == () and sum(v.numel() for v in views.values()) == 13
    views["w[0:2]"].zero_()
    assert parameters["w"][:2].abs().sum() == 0 and parameters["w"][2, 0] == 4.0
