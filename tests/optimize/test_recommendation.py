"""The rule that recommends one pair of artifact and execution, case by case."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from optimize.measure.figures import Accuracy, Difference, Footprint, Measured
from optimize.measure.latency import Speed
from optimize.measure.rows import ModelFile, Pair, Recommendation, Row, Skip
from optimize.measure.statistics import paired_difference, paired_interval
from optimize.run.halves import halves, images_to_split
from optimize.run.recommendation import Recommend, recommend
from optimize.run.turns import turns
from serve.runtime.errors import UserError
from serve.runtime.execution import Execution


@dataclass(frozen=True)
class Case:
    """A pair: the milliseconds of each of its rounds (None: not measured), its size, images gained and lost.

    Cases of one name are executions of one artifact.
    """

    name: str
    rounds: list[list[float]] | None
    bytes: int
    gained: int = 0
    lost: int = 0
    images: int = 1000
    batch8: float = 8.0
    skip: str = ""
    engine: str = "e"

    @property
    def id(self) -> str:
        return f"{self.name}@{self.engine}"

    def row(self, baseline: Speed) -> Row:
        file = ModelFile(path="model", bytes=self.bytes, key="0", format="onnx", precision="int8")
        known: dict[str, Any] = {"name": self.name, "operation": "pass", "config": {}, "parent": None, "file": file}
        if self.rounds is None:
            return Row(**known, skip=Skip(kind="cannot_run_here", reason=self.skip))
        timed = self.speed().against(baseline, baseline)
        # The table's interval is not what the rule goes by: it takes the counts, at its own confidence.
        delta = (self.gained - self.lost) / self.images
        difference = Difference(delta=delta, low=-1, high=1, gained=self.gained, lost=self.lost)
        measured = Measured(
            **dict(timed),
            accuracy=Accuracy(top1=0.9, top5=1.0, images=self.images, answers="a", difference=difference),
            footprint=Footprint(load_ms=1.0, memory_bytes=1),
        )
        return Row(**known, pairs=(Pair(id=self.id, execution=Execution(self.engine), measured=measured),))

    def speed(self) -> Speed:
        assert self.rounds is not None
        return Speed({1: self.rounds, 8: [[self.batch8]] * len(self.rounds)})


def choose(
    *cases: Case, right: dict[str, np.ndarray] | None = None, yardstick: str = "", **rule: Any
) -> Recommendation:
    """By the rule; speeds are multiples of those of ``yardstick``, or of the first."""
    speeds = {case.id: case.speed() for case in cases if case.rounds}
    measure = speeds.get(yardstick or cases[0].id, Speed({1: [[1.0]] * 7, 8: [[1.0]] * 7}))
    rows: dict[str, Row] = {}
    for made in (case.row(measure) for case in cases):
        known = rows.get(made.name)
        rows[made.name] = made.model_copy(update={"pairs": (*known.pairs, *made.pairs)}) if known else made
    return recommend(list(rows.values()), speeds, Recommend(**rule), right)


def row(name: str, ms: float | list[float], size: int, **more: Any) -> Case:
    """Seven rounds of one call each, all equal or as given."""
    return Case(name, [[each] for each in (ms if isinstance(ms, list) else [ms] * 7)], size, **more)


def low(gained: int, lost: int, images: int) -> float:
    return paired_difference(
        [False] * gained + [True] * (images - gained), [True] * (images - lost) + [False] * lost
    ).low


def test_the_fastest_is_chosen_among_accurate_ones() -> None:
    chosen = choose(row("baseline", 10, 100), row("fuse", 8, 100), row("ptq", 2, 30, gained=2, lost=4))
    assert chosen.name == "ptq"
    assert chosen.rejected == {
        "baseline@e": "5.00 times the latency of ptq@e",
        "fuse@e": "4.00 times the latency of ptq@e",
    }
    assert "less than 2 points below" in chosen.rule
    assert (chosen.unproven, chosen.remarks) == (None, ())


def test_one_that_may_lose_too_much_is_rejected_however_fast() -> None:
    assert low(0, 14, 1000) < -0.02 < low(0, 9, 1000)
    chosen = choose(row("baseline", 10, 100), row("ptq", 2, 30, lost=14), row("qat", 3, 30, lost=9))
    assert chosen.name == "qat"
    assert chosen.rejected["ptq@e"].startswith(
        "its top-1 may be 2.3 points below the baseline's (measured on 1,000 images"
    )


def test_a_loss_that_was_measured_is_named_and_more_images_are_not_asked_for() -> None:
    chosen = choose(row("baseline", 10, 100), row("ptq", 2, 30, lost=40))
    assert chosen.rejected["ptq@e"] == "its top-1 may be 5.4 points below the baseline's (measured: 4.0)"
    assert chosen.unproven is None


def test_what_the_interval_must_exclude_is_the_users_choice() -> None:
    cases = (row("baseline", 10, 100), row("ptq", 2, 30, lost=14))
    assert choose(*cases).name == "baseline"
    assert choose(*cases, max_drop=0.03).name == "ptq"
    assert choose(*cases, confidence=0.8).name == "ptq"
    assert "with 80 % confidence" in choose(*cases, confidence=0.8).rule


def test_too_few_images_say_how_many_would_do_and_name_the_unproven_best() -> None:
    chosen = choose(row("baseline", 10, 100, images=60), row("onnx-int8", 2, 30, images=60))
    assert chosen.name == "baseline"
    assert chosen.unproven == "onnx-int8@e"
    said = " ".join(chosen.remarks)
    assert "60 images cannot show a loss below 2 points, 189 would" in said
    assert "Unproven best: onnx-int8@e (5.00 times as fast)" in said
    # With 189 images the very same rows prove it.
    chosen = choose(row("baseline", 10, 100, images=189), row("onnx-int8", 2, 30, images=189))
    assert (chosen.name, chosen.unproven, chosen.remarks) == ("onnx-int8", None, ())
    assert choose(row("baseline", 10, 100, images=188), row("onnx-int8", 2, 30, images=188)).name == "baseline"


def test_with_enough_images_an_unproven_best_is_named_with_the_number_that_would_decide() -> None:
    chosen = choose(row("baseline", 10, 100), row("ptq", 2, 30, gained=20, lost=30), row("qat", 5, 30))
    assert (chosen.name, chosen.unproven) == ("qat", "ptq@e")
    needed = int(re.search(r"if it goes on so, ([\d,]+) images", chosen.rejected["ptq@e"])[1].replace(",", ""))  # type: ignore[index]
    assert low(round(needed * 0.02), round(needed * 0.03), needed) > -0.02 - 1e-4
    assert low(round(needed * 0.018), round(needed * 0.027), round(needed * 0.9)) < -0.02


def test_of_those_level_in_speed_the_surely_more_accurate_is_chosen() -> None:
    chosen = choose(row("baseline", 10, 100), row("ptq", 2, 20), row("qat", [2.02] * 6 + [1.9], 30, gained=60))
    assert chosen.name == "qat"
    assert chosen.rejected["ptq@e"].startswith("as fast as qat@e, and its interval of top-1 begins ")


def test_a_more_accurate_one_that_is_plainly_slower_is_not_chosen() -> None:
    chosen = choose(row("baseline", 10, 100), row("ptq", 2, 20), row("qat", 2.2, 30, gained=60))
    assert chosen.name == "ptq"
    assert chosen.rejected["qat@e"] == "1.10 times the latency of ptq@e"


def test_of_those_level_in_speed_and_accuracy_the_smallest_file_is_chosen() -> None:
    noisy = [2.1, 1.9, 2.04, 2.0, 2.1, 1.95, 2.02]
    chosen = choose(row("baseline", 10, 100), row("ptq", 2, 30), row("onnx-int8", noisy, 20), row("onnx", 4, 10))
    assert chosen.name == "onnx-int8"
    assert chosen.rejected["ptq@e"] == "as fast as onnx-int8@e, and a larger file"
    assert chosen.rejected["onnx@e"] == "2.00 times the latency of ptq@e"


def test_each_objective_has_its_own_winner() -> None:
    steady, spread = [[2.0] * 20] * 7, [[1.0] * 18 + [6.0, 6.0]] * 7
    cases = (
        row("baseline", 10, 100),
        Case("steady", steady, 90, batch8=16.0),
        Case("spread", spread, 80, batch8=12.0),
        row("batched", 3, 70, batch8=4.0),
        row("small", 9, 10, batch8=30.0),
    )
    winners = {goal: choose(*cases, objective=goal).name for goal in ("latency", "p95", "throughput", "size")}
    assert winners == {"latency": "spread", "p95": "steady", "throughput": "batched", "size": "small"}
    assert choose(*cases, objective="size").rejected["batched@e"] == "7.00 times the size of small@e"
    assert choose(*cases, objective="throughput").rejected["spread@e"] == "3.00 times the time per image of batched@e"


def test_of_files_of_nearly_one_size_the_more_accurate_is_chosen() -> None:
    cases = (row("baseline", 10, 100_000), row("ptq", 2, 10_000), row("qat", 2, 10_001, gained=60))
    assert choose(*cases, objective="size").name == "qat"
    assert choose(cases[0], cases[1], row("qat", 2, 10_400, gained=60), objective="size").name == "ptq"


def test_a_long_tail_of_the_chosen_one_is_said_and_who_has_none() -> None:
    steady, spread = Case("steady", [[2.0] * 20] * 7, 90), Case("spread", [[0.52] * 18 + [4.64] * 2] * 7, 80)
    chosen = choose(row("baseline", 10, 100), steady, spread)
    assert chosen.name == "spread"
    (remark,) = chosen.remarks
    assert "4.64 ms or more, 8.9 times its p50 of 0.52 (others: 1.0 times)" in remark
    assert "objective: p95 would choose steady@e" in remark
    everyone = Case("baseline", [[10.0] * 18 + [90.0] * 2] * 7, 100)
    assert choose(everyone, spread).remarks == ()  # the machine's, not the artifact's
    assert choose(row("baseline", 10, 100), steady, spread, objective="p95").remarks == ()


def test_what_is_slower_than_the_baseline_is_not_recommended_without_saying_so() -> None:
    cases = (row("baseline", 2, 100), row("ptq", 3, 30))
    assert choose(*cases).name == "baseline"
    chosen = choose(*cases, objective="size")
    assert chosen.name == "ptq"
    assert chosen.remarks == (
        "ptq@e is not faster than the fastest float execution: at batch 1 it has 0.67 times its speed.",
    )


def test_the_baseline_is_chosen_where_nothing_is_better() -> None:
    chosen = choose(row("baseline", 2, 100), row("ptq", 3, 30))
    assert chosen.name == "baseline"
    assert "1.50 times the latency of baseline@e" in chosen.rejected["ptq@e"]
    assert chosen.unproven is None


@pytest.mark.parametrize(("top1", "guesses"), [(36 / 359, True), (43 / 359, True), (60 / 359, False)])
def test_a_baseline_that_knows_no_more_than_one_who_guesses_is_told(top1: float, guesses: bool) -> None:
    case = row("baseline", 4.0, 40, images=359)
    made = case.row(case.speed())
    (pair,) = made.pairs
    assert pair.measured is not None
    accuracy = pair.measured.accuracy.model_copy(update={"top1": top1})
    measured = pair.measured.model_copy(update={"accuracy": accuracy})
    rows = [made.model_copy(update={"pairs": (pair.model_copy(update={"measured": measured}),)})]
    found = recommend(rows, {case.id: case.speed()}, Recommend(), classes=10)
    told = f"The baseline's top-1 of {100 * top1:.2f} % on 359 images is not above what guessing among 10 classes gives"
    assert any(remark.startswith(told) for remark in found.remarks) == guesses
    assert not any("guessing" in remark for remark in recommend(rows, {case.id: case.speed()}, Recommend()).remarks)


def test_what_was_not_measured_is_rejected_for_its_own_reason() -> None:
    chosen = choose(row("baseline", 2, 100), Case("half", None, 50, skip="runs on CUDA only"))
    assert (chosen.name, chosen.rejected) == ("baseline", {"half": "runs on CUDA only"})


def test_where_nothing_was_measured_nothing_is_recommended() -> None:
    chosen = choose(Case("baseline", None, 50, skip="runs on CUDA only"))
    assert (chosen.name, chosen.rejected) == (None, {"baseline": "runs on CUDA only"})


@pytest.mark.parametrize(
    "rule", [{"objective": "speed"}, {"max_drop": -0.1}, {"max_drop": 1.1}, {"confidence": 1.0}, {"confidence": 0.2}]
)
def test_a_rule_that_is_none_is_refused_in_one_line(rule: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"^{next(iter(rule))}: "):
        Recommend(**rule)


# --- pairs


def test_of_an_artifacts_executions_each_is_a_candidate() -> None:
    slow, fast = row("onnx-int8", 3, 30, engine="onnxruntime"), row("onnx-int8", 2, 30, engine="openvino")
    chosen = choose(row("baseline", 10, 100), slow, fast)
    assert (chosen.name, chosen.pair) == ("onnx-int8", "onnx-int8@openvino")
    assert chosen.execution == Execution("openvino")
    assert chosen.rejected["onnx-int8@onnxruntime"] == "1.50 times the latency of onnx-int8@openvino"


def test_an_execution_whose_answers_are_worse_is_rejected_and_the_other_of_the_same_file_is_not() -> None:
    wrong, exact = row("ptq", 1, 30, engine="saturating", lost=60), row("ptq", 2, 30, engine="exact")
    chosen = choose(row("baseline", 10, 100), wrong, exact)
    assert chosen.pair == "ptq@exact"
    assert "below the baseline's" in chosen.rejected["ptq@saturating"]


def test_a_float_pair_that_is_faster_than_an_int8_one_is_chosen() -> None:
    floats = row("onnx", 1.87, 100, engine="openvino"), row("onnx", 3, 100, engine="onnxruntime")
    chosen = choose(row("baseline", 10, 100), *floats, row("onnx-int8", 2.22, 30, engine="onnxruntime"))
    assert chosen.pair == "onnx@openvino"


def test_what_is_slower_than_the_fastest_float_is_not_recommended_without_saying_so() -> None:
    cases = (row("baseline", 10, 100), row("onnx", 2, 90), row("ptq", 3, 30))
    chosen = choose(*cases, objective="size", yardstick="onnx@e")
    assert chosen.pair == "ptq@e"
    assert any("not faster than the fastest float execution" in remark for remark in chosen.remarks)
    assert choose(*cases, yardstick="onnx@e").remarks == ()


def test_with_too_few_images_the_baseline_is_allowed_on_every_engine() -> None:
    cases = (row("baseline", 10, 100, images=60), row("baseline", 5, 100, images=60, engine="openvino"))
    assert choose(*cases, row("ptq", 2, 30, images=60)).pair == "baseline@openvino"
    worse = row("baseline", 5, 100, images=60, engine="openvino", lost=3)
    assert choose(cases[0], worse, row("ptq", 2, 30, images=60)).pair == "baseline@e"


# --- what the choice is made by


def correct(images: int, wrong: list[int]) -> np.ndarray:
    found = np.ones(images, dtype=bool)
    found[wrong] = False
    return found


def test_where_half_of_the_images_are_enough_they_choose_and_the_others_judge() -> None:
    images, wrong = 1000, list(range(0, 1000, 250))
    right = {"baseline@e": correct(images, []), "ptq@e": correct(images, wrong)}
    chosen = choose(row("baseline", 10, 100), row("ptq", 2, 30, lost=4), right=right)
    assert chosen.pair == "ptq@e"
    assert chosen.judged is not None
    assert chosen.judged.difference is not None
    judge = halves(right["baseline@e"]).judge
    lost = sum(place in set(judge.tolist()) for place in wrong)
    expected = paired_difference([True] * 500, [True] * (500 - lost) + [False] * lost)
    assert chosen.judged.images == 500
    assert chosen.judged.top1 == pytest.approx(1 - lost / 500)
    assert (chosen.judged.difference.low, chosen.judged.difference.high) == (expected.low, expected.high)
    assert "among 2 pairs by 500 of the images" in (chosen.selection or "")


def test_only_the_half_that_chooses_is_asked() -> None:
    choosing, judging = halves(np.ones(1000, dtype=bool))
    everywhere = {"baseline@e": correct(1000, [])}
    cases = (row("baseline", 10, 100), row("ptq", 2, 30, lost=40))
    spoilt = choose(*cases, right={**everywhere, "ptq@e": correct(1000, choosing[:40].tolist())})
    assert spoilt.pair == "baseline@e"
    assert spoilt.judged is not None
    assert (spoilt.judged.top1, spoilt.judged.difference) == (1.0, None)
    lucky = choose(*cases, right={**everywhere, "ptq@e": correct(1000, judging[:40].tolist())})
    assert lucky.pair == "ptq@e"
    assert lucky.judged is not None
    assert lucky.judged.top1 == pytest.approx(0.92)  # the choice does not see it, and the report does


def test_with_fewer_images_all_of_them_choose_and_the_reader_is_told_what_that_does() -> None:
    enough = images_to_split(0.02, 0.95)
    assert enough is not None
    for images, split in ((enough - 1, False), (enough, True)):
        right = {"baseline@e": correct(images, []), "ptq@e": correct(images, [])}
        chosen = choose(row("baseline", 10, 100, images=images), row("ptq", 2, 30, images=images), right=right)
        assert (chosen.judged is not None) is split
        assert ("it is the best of 2 pairs" in (chosen.selection or "").lower()) is not split
        assert (f"From {enough:,} images on" in (chosen.selection or "")) is not split
    assert choose(row("baseline", 10, 100)).selection is None  # there was no choice


def test_each_half_alone_proves_the_drop_though_one_image_in_fifty_changes_sides() -> None:
    for drop in (0.005, 0.01, 0.02, 0.05):
        half = (images_to_split(drop, 0.95) or 0) // 2
        assert paired_interval(half * 0.01, half * 0.01, half).low > -drop  # type: ignore[arg-type]
        assert paired_interval((half - 1) * 0.01, (half - 1) * 0.01, half - 1).low <= -drop  # type: ignore[arg-type]


@given(arrays(np.bool_, st.integers(2, 300)))
def test_the_halves_are_all_images_once_with_as_many_easy_ones_in_both(right: np.ndarray) -> None:
    choosing, judging = halves(right)
    assert sorted([*choosing.tolist(), *judging.tolist()]) == list(range(len(right)))
    assert abs(len(choosing) - len(judging)) <= 1
    assert abs(int(right[choosing].sum()) - int(right[judging].sum())) <= 1
    assert all(np.array_equal(a, b) for a, b in zip((choosing, judging), halves(right), strict=True))


def test_the_halves_are_not_the_first_and_the_last_images() -> None:
    choosing, _ = halves(np.ones(1000, dtype=bool))
    assert 150 < int((choosing < 500).sum()) < 350


# --- what speeds are multiples of


def speed_of(ms: float) -> Speed:
    return Speed({1: [[ms]] * 3})


def test_the_yardstick_is_the_fastest_float_be_it_pair_or_reference() -> None:
    speeds = {"baseline@e": speed_of(10), "onnx@openvino": speed_of(4), "onnx@ort": speed_of(5), "ptq@e": speed_of(1)}
    floats = ["baseline@e", "onnx@openvino", "onnx@ort", "eager", "torch.compile"]
    found = turns(speeds | {"eager": speed_of(12)}, floats=floats, baseline=["baseline@e"])
    assert (found.yardstick, found.eager) == ("onnx@openvino", "eager")
    timed = found.timed("ptq@e")
    assert (timed.speedup.value, timed.vs_eager.value) == (4, 12)
    compiled = turns(speeds | {"torch.compile": speed_of(3)}, floats=floats, baseline=["baseline@e"])
    assert (compiled.yardstick, compiled.eager) == ("torch.compile", "baseline@e")


def test_where_no_float_was_measured_the_baselines_fastest_is_the_yardstick() -> None:
    speeds = {"ptq@slow": speed_of(3), "ptq@fast": speed_of(2), "qat@e": speed_of(1)}
    found = turns(speeds, floats=[], baseline=["ptq@slow", "ptq@fast"])
    assert (found.yardstick, found.eager) == ("ptq@fast", "ptq@fast")
