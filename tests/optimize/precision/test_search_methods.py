"""Which layers two methods leave in float, and by how many trials: pure functions, and an oracle for the trials."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimize.precision.search_methods import METHODS, Method, given_back, greedy, halving


class Oracle:
    """A network that holds if all of some layers are in float; it counts what it is asked, each set once."""

    def __init__(self, sensitive: Sequence[str]) -> None:
        self.sensitive = frozenset(sensitive)
        self.asked: dict[frozenset[str], bool] = {}

    def __call__(self, left: frozenset[str]) -> bool:
        assert left, "that it does not hold with none in float is known"
        return self.asked.setdefault(left, self.sensitive <= left)


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    """Layers in any order, and those of them that are sensitive, at least one."""
    layers = [f"layer{number}" for number in range(draw(st.integers(1, 24)))]
    sensitive = draw(st.lists(st.sampled_from(layers), min_size=1, unique=True))
    return draw(st.permutations(layers)), sensitive


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@given(network=networks())
def test_exactly_the_sensitive_layers_stay_in_float(method: Method, network: tuple[list[str], list[str]]) -> None:
    layers, sensitive = network
    assert method(layers, Oracle(sensitive)) == frozenset(sensitive)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@given(layers=st.integers(1, 12), answers=st.randoms(use_true_random=False))
def test_whatever_the_trials_answer_what_is_returned_has_held(method: Method, layers: int, answers) -> None:
    """Real networks are not monotone: one more layer in float may lose an image."""
    names = [f"layer{number}" for number in range(layers)]
    known: dict[frozenset[str], bool] = {frozenset(names): True}

    def holds(left: frozenset[str]) -> bool:
        return known.setdefault(left, answers.random() < 0.3)

    assert known[method(names, holds)]


def test_with_the_right_order_greedy_asks_few_times() -> None:
    layers = [f"layer{number}" for number in range(64)]
    oracle = Oracle(layers[:3])
    assert greedy(layers, oracle) == frozenset(layers[:3])
    # 1, 2 and 4 layers, then 3; and that neither of the two before the third can go, both at once or one by one.
    assert len(oracle.asked) == 4 + 3


def test_halving_needs_no_order_but_more_trials_than_greedy_with_a_right_one() -> None:
    layers = [f"layer{number}" for number in range(64)]
    sensitive = ["layer7", "layer40"]
    ordered = [*sensitive, *(name for name in layers if name not in sensitive)]
    first, second = Oracle(sensitive), Oracle(sensitive)
    assert greedy(ordered, first) == halving(layers, second) == frozenset(sensitive)
    assert len(first.asked) < len(second.asked) < len(layers)


def test_one_layer_that_must_stay_is_found_by_one_trial() -> None:
    oracle = Oracle(["a"])
    assert greedy(["a", "b", "c"], oracle) == {"a"}
    assert len(oracle.asked) == 1


def test_many_are_given_back_at_once() -> None:
    layers = [f"layer{number}" for number in range(16)]
    oracle = Oracle(["last"])
    assert given_back(layers, frozenset([*layers, "last"]), oracle) == {"last"}
    assert len(oracle.asked) == 1
