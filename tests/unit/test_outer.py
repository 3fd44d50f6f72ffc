"""Merging and the outer optimizer, against arithmetic done by hand and against torch's own optimizer."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_runtime.outer import SHORT_DIRECTION, Merger, merge, merge_weights, outer_step
from diloco_runtime.records import Fragment, TensorPiece

KEY = "w[0:2]"
usual = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def fragment(*shapes: tuple[int, ...], how: str = "rda") -> Fragment:
    """Return a fragment of whole tensors; the first is `w`, the others `w1`, `w2` and so on."""
    return Fragment(
        pieces=tuple(
            TensorPiece(name=f"w{i or ''}", shape=s, start=0, stop=s[0] if s else 1, merge=how)
            for i, s in enumerate(shapes)
        )
    )


def merged(method: str, *offers: tuple[list[float], float], how: str = "rda") -> list[float]:
    """Merge (delta, share) pairs of one vector."""
    size = len(offers[0][0])
    part = fragment((size,), how=how)
    (key,) = (piece.key for piece in part.pieces)
    result = merge(part, method, [({key: torch.tensor(delta)}, share) for delta, share in offers])
    assert result.keys() == {key} and result[key].dtype == torch.float32
    return result[key].tolist()


# ---- shares ---------------------------------------------------------------------------------------------------------


def test_the_papers_weight_is_tokens_times_tokens_per_step() -> None:
    # 100 tokens in 10 steps: 100 * 10 = 1000; 300 tokens in 10 steps: 300 * 30 = 9000; 100 in 1: 100 * 100 = 10000.
    assert merge_weights([(100, 10), (300, 10), (100, 1)], "paper") == [0.05, 0.45, 0.5]


def test_the_other_weight_is_tokens() -> None:
    assert merge_weights([(100, 10), (300, 10), (100, 1)], "tokens") == [0.2, 0.6, 0.2]


@pytest.mark.parametrize("scheme", ["paper", "tokens"])
def test_without_tokens_every_offer_has_the_same_share(scheme: str) -> None:
    assert merge_weights([(0, 3), (0, 5)], scheme) == [0.5, 0.5]
    assert merge_weights([(0, 3), (7, 5)], scheme) == [0.0, 1.0]
    assert merge_weights([(7, 5)], scheme) == [1.0]


@usual
@given(
    offers=st.lists(st.tuples(st.integers(0, 10**12), st.integers(1, 10**6)), min_size=1, max_size=12),
    scheme=st.sampled_from(["paper", "tokens"]),
)
def test_shares_add_up_to_one(offers: list[tuple[int, int]], scheme: str) -> None:
    shares = merge_weights(offers, scheme)
    assert math.fsum(shares) == pytest.approx(1.0, abs=1e-12) and min(shares) >= 0.0


# ---- mean and RDA ---------------------------------------------------------------------------------------------------


def test_the_mean_is_the_weighted_sum() -> None:
    assert merged("mean", ([3.0, 0.0], 0.5), ([0.0, 4.0], 0.5)) == [1.5, 2.0]
    assert merged("mean", ([1.0, 2.0], 0.25), ([5.0, -2.0], 0.75)) == [4.0, -1.0]


def test_rda_has_the_mean_length_along_the_mean_direction() -> None:
    # Lengths 3 and 4: mean 3.5. Directions (1,0) and (0,1): mean (0.5,0.5), that is 45 degrees.
    expected = 3.5 / math.sqrt(2.0)
    assert merged("rda", ([3.0, 0.0], 0.5), ([0.0, 4.0], 0.5)) == pytest.approx([expected, expected], rel=1e-6)
    # Lengths 5 and 10, shares 0.6 and 0.4: mean 7. Directions (0.6,0.8) and (0.6,-0.8): 0.6 of the one and 0.4 of the
    # other is (0.6,0.16), of length sqrt(0.3856).
    length = math.sqrt(0.6**2 + 0.16**2)
    found = merged("rda", ([3.0, 4.0], 0.6), ([6.0, -8.0], 0.4))
    assert found == pytest.approx([7.0 * 0.6 / length, 7.0 * 0.16 / length], rel=1e-6)


def test_parallel_deltas_have_the_same_mean_and_rda() -> None:
    offers = (([1.0, 2.0], 0.25), ([2.0, 4.0], 0.75))
    assert merged("rda", *offers) == pytest.approx(merged("mean", *offers), rel=1e-6) == [1.75, 3.5]


def test_rda_of_a_delta_of_zeros_counts_it_in_the_length_only() -> None:
    # Lengths 0 and 10, mean 5; the direction is the other's alone.
    assert merged("rda", ([0.0, 0.0], 0.5), ([6.0, 8.0], 0.5)) == pytest.approx([3.0, 4.0], rel=1e-6)
    assert merged("rda", ([0.0, 0.0], 0.5), ([0.0, 0.0], 0.5)) == [0.0, 0.0]


def test_every_tensor_has_its_own_direction() -> None:
    part = fragment((2,), (2,))
    deltas = [
        {KEY: torch.tensor([3.0, 0.0]), "w1[0:2]": torch.tensor([2.0, 0.0])},
        {KEY: torch.tensor([0.0, 4.0]), "w1[0:2]": torch.tensor([4.0, 0.0])},
    ]
    found = merge(part, "rda", [(delta, 0.5) for delta in deltas])
    assert found[KEY].tolist() == pytest.approx([3.5 / math.sqrt(2)] * 2, rel=1e-6)
    assert found["w1[0:2]"].tolist() == pytest.approx([3.0, 0.0], rel=1e-6)


def test_a_matrix_is_one_direction_not_one_per_row() -> None:
    part = fragment((2, 2))
    first, second = torch.tensor([[3.0, 0.0], [0.0, 4.0]]), torch.tensor([[3.0, 0.0], [0.0, -4.0]])
    found = merge(part, "rda", [({KEY: first}, 0.5), ({KEY: second}, 0.5)])[KEY]
    torch.testing.assert_close(found, torch.tensor([[5.0, 0.0], [0.0, 0.0]]))


# ---- where RDA is the mean ------------------------------------------------------------------------------------------


def test_deltas_that_point_nowhere_in_common_are_averaged() -> None:
    assert merged("rda", ([3.0, 0.0], 0.5), ([-1.0, 0.0], 0.5)) == [1.0, 0.0]


def test_the_limit_is_a_tenth_over_the_root_of_the_number_of_offers() -> None:
    """Opposite directions with shares s and 1-s have a mean unit vector of length |2s - 1|."""
    limit = SHORT_DIRECTION / math.sqrt(2)
    assert limit == pytest.approx(0.0707, abs=1e-4)
    below, above = 0.5 + 0.99 * limit / 2, 0.5 + 1.01 * limit / 2
    mean = 10.0 * below - 2.0 * (1 - below)
    assert merged("rda", ([10.0, 0.0], below), ([-2.0, 0.0], 1 - below)) == pytest.approx([mean, 0.0], rel=1e-5)
    length = 10.0 * above + 2.0 * (1 - above)
    assert merged("rda", ([10.0, 0.0], above), ([-2.0, 0.0], 1 - above)) == pytest.approx([length, 0.0], rel=1e-5)
    # The same two with two more offers without any share: M = 4, the limit is 0.05, and the direction is long enough.
    nothing = ([0.0, 7.0], 0.0)
    four = merged("rda", ([10.0, 0.0], below), ([-2.0, 0.0], 1 - below), nothing, nothing)
    assert four == pytest.approx([10.0 * below + 2.0 * (1 - below), 0.0], rel=1e-5)


def test_a_tensor_of_one_number_is_averaged() -> None:
    for shape in [(), (1,), (1, 1)]:
        part = fragment(shape)
        (key,) = (piece.key for piece in part.pieces)
        deltas = [torch.full(shape, 4.0), torch.full(shape, -2.0)]
        # RDA would be the mean length 2.5 with the sign of the mean direction, 0.25 * 1 - 0.75 * 1 < 0.
        found = merge(part, "rda", [({key: deltas[0]}, 0.25), ({key: deltas[1]}, 0.75)])[key]
        assert found.shape == shape and float(found) == -0.5


def test_what_the_table_merges_by_the_mean_is_averaged() -> None:
    offers = (([3.0, 0.0], 0.5), ([0.0, 4.0], 0.5))
    assert merged("rda", *offers, how="mean") == merged("mean", *offers) == [1.5, 2.0]


def test_one_offer_is_taken_as_it_is() -> None:
    """To the last bit: a unit vector times its length would round."""
    delta = torch.randn(50, generator=torch.Generator().manual_seed(1))
    part = fragment((50,))
    for method in ("rda", "mean"):
        assert torch.equal(merge(part, method, [({"w[0:50]": delta}, 1.0)])["w[0:50]"], delta)


def test_offers_are_not_changed_by_merging_them() -> None:
    deltas = [torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])]
    merger = Merger(fragment((2,)), "rda")
    for delta in deltas:
        merger.add({KEY: delta}, 1.0)
        merger.result()
    assert [delta.tolist() for delta in deltas] == [[3.0, 0.0], [0.0, 4.0]]


@usual
@given(seed=st.integers(0, 10**6), count=st.integers(2, 5), size=st.integers(2, 30))
def test_rda_against_the_formula_in_double_precision(seed: int, count: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    deltas = torch.randn(count, size, generator=generator) + 0.5
    shares = torch.softmax(torch.randn(count, generator=generator), 0).double()
    exact = deltas.double()
    norms = exact.norm(dim=1, keepdim=True)
    direction = (shares[:, None] * exact / norms).sum(0)
    if abs(float(direction.norm()) * math.sqrt(count) - SHORT_DIRECTION) < 1e-3:
        return
    expected = (shares @ norms) * direction / direction.norm()
    if float(direction.norm()) < SHORT_DIRECTION / math.sqrt(count):
        expected = shares @ exact
    found = merged("rda", *((d.tolist(), float(s)) for d, s in zip(deltas, shares, strict=True)))
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected, atol=1e-5, rtol=1e-5)


# ---- outer optimizer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (1.0, 0.5), (0.1, 0.99), (0.7, 0.0)])
def test_several_steps_are_torchs_sgd_with_nesterov_momentum(lr: float, momentum: float) -> None:
    generator = torch.Generator().manual_seed(3)
    start = {KEY: torch.randn(2, generator=generator), "v[0:3]": torch.randn(3, 4, generator=generator)}
    theirs = {key: torch.nn.Parameter(value.clone()) for key, value in start.items()}
    optimizer = torch.optim.SGD(theirs.values(), lr=lr, momentum=momentum, nesterov=momentum > 0)
    params: dict[str, torch.Tensor] = start
    buffer: dict[str, torch.Tensor] | None = None
    for _ in range(8):
        delta = {key: torch.randn(value.shape, generator=generator) for key, value in params.items()}
        params, buffer = outer_step(params, buffer, delta, lr, momentum)
        for key, parameter in theirs.items():
            parameter.grad = delta[key].clone()
        optimizer.step()
        for key, parameter in theirs.items():
            torch.testing.assert_close(params[key], parameter.detach(), atol=2e-6, rtol=1e-6)
            if buffer is not None:
                torch.testing.assert_close(buffer[key], optimizer.state[parameter]["momentum_buffer"])
    assert (buffer is None) == (momentum == 0.0)


def test_two_steps_by_hand() -> None:
    one = {KEY: torch.tensor([1.0, 0.0])}
    params, buffer = outer_step({KEY: torch.tensor([10.0, 10.0])}, None, one, 0.5, 0.5)
    # b = 1, p = 10 - 0.5 * (1 + 0.5 * 1)
    assert params[KEY].tolist() == [9.25, 10.0] and buffer is not None and buffer[KEY].tolist() == [1.0, 0.0]
    params, buffer = outer_step(params, buffer, {KEY: torch.tensor([2.0, 4.0])}, 0.5, 0.5)
    # b = 0.5 * 1 + 2 = 2.5, p = 9.25 - 0.5 * (2 + 1.25); b = 4, p = 10 - 0.5 * (4 + 2)
    assert params[KEY].tolist() == [7.625, 7.0] and buffer is not None and buffer[KEY].tolist() == [2.5, 4.0]


def test_a_delta_is_walked_down_not_up() -> None:
    """`anchor - local` with rate 1 and no momentum ends at `local`."""
    anchor, local = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 4.0])
    assert outer_step({KEY: anchor}, None, {KEY: anchor - local}, 1.0, 0.0)[0][KEY].tolist() == [0.5, 4.0]


def test_without_momentum_the_buffer_stays() -> None:
    buffer = {KEY: torch.tensor([5.0, 6.0])}
    params, kept = outer_step({KEY: torch.zeros(2)}, buffer, {KEY: torch.tensor([1.0, 2.0])}, 0.5, 0.0)
    assert params[KEY].tolist() == [-0.5, -1.0] and kept is not None and kept[KEY].tolist() == [5.0, 6.0]


def test_nothing_that_was_passed_in_changes() -> None:
    """The syncer keeps the parameters it stepped from: another's commit may win, and then they are stepped again."""
    given_ = {name: {KEY: torch.tensor([1.0, 2.0])} for name in ("params", "buffer", "delta")}
    for momentum in (0.9, 0.0):
        for buffer in (given_["buffer"], None):
            params, after = outer_step(given_["params"], buffer, given_["delta"], 0.7, momentum)
            params[KEY].zero_()
            if after is not None and momentum:
                after[KEY].zero_()
    assert all(value[KEY].tolist() == [1.0, 2.0] for value in given_.values())


def test_a_delta_too_short_for_a_direction_spoils_nothing() -> None:
    """The inverse of its norm is not finite in fp32."""
    found = merged("rda", ([1e-40, 1e-40], 0.5), ([3.0, 4.0], 0.5))
    assert all(math.isfinite(value) for value in found) and found[1] > 0.0
