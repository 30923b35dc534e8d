"""Variants that cannot be made are rows with their reasons, and names say in short how variants differ."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.ao.quantization.observer import MinMaxObserver

import optimize as opt
from optimize.arguments import step_name, step_names
from optimize.models.module_source import module_source
from optimize.report.comparison import Comparison
from optimize.run.session import Session
from optimize.store.artifact import Product
from optimize.store.objects import Store
from tests.optimize.quantization.test_foreign_observers import Half
from tests.optimize.runs_fixtures import references
from tests.optimize.tiny_net import Tiny
from tests.optimize.workbench import noise_context

pytestmark = pytest.mark.usefixtures("uncompiled")

QUICK = opt.Timing(rounds=1, seconds=0.005, batch_sizes=(1,), executions=("exported", "torchscript"))


class Explodes(MinMaxObserver):
    """Fails as a library does, once it is used for good."""

    def forward(self, x_orig: torch.Tensor) -> torch.Tensor:
        if x_orig.shape[0] > 2:
            raise RuntimeError("expected scalar type Byte\nbut found Float")
        seen: torch.Tensor = super().forward(x_orig)
        return seen


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> opt.Variant:
    torch.manual_seed(0)
    source, checkpoint = module_source(Tiny(4))
    session = Session(Store(tmp_path_factory.mktemp("failing") / "store"), source, noise_context())
    return opt.Variant(session, session.baseline(checkpoint=checkpoint))


@pytest.fixture(scope="module")
def made(base: opt.Variant) -> list[opt.Variant | opt.Failed]:
    settings = [
        opt.Ptq(images=32, observer="minmax"),
        opt.Ptq(images=32, keep_float=("nowhere", "absent")),
        opt.Ptq(images=32, observer=Explodes),
        opt.Ptq(images=32, keep_float=("*",)),
    ]
    return opt.apply_each(base, settings)


@pytest.fixture(scope="module")
def equal(base: opt.Variant) -> list[opt.Variant]:
    """Of one name, from two parents."""
    fused = opt.apply(base, opt.Fuse())
    return [fused, *(opt.apply(parent, opt.Ptq(images=32), "int8") for parent in (base, fused))]


@pytest.fixture(scope="module")
def comparison(
    uncompiled: None, base: opt.Variant, made: list[opt.Variant | opt.Failed], equal: list[opt.Variant]
) -> Comparison:
    with references(graphs=False):
        return opt.compare(base, *made, *equal, timing=QUICK)


def test_what_fails_ends_none_of_the_others(made: list[opt.Variant | opt.Failed]) -> None:
    assert [type(each) for each in made] == [opt.Variant, opt.Failed, opt.Failed, opt.Failed]
    assert [each.name for each in made] == [
        "ptq-observer-minmax",
        "ptq-keepfloat-nowhere-absent",
        "ptq-observer-explodes",
        "ptq-keepfloat",
    ]
    reasons = [each.reason for each in made if isinstance(each, opt.Failed)]
    assert "nowhere" in reasons[0]
    assert "absent" in reasons[0]
    assert reasons[1] == "RuntimeError: expected scalar type Byte"
    assert "no layer that it can quantize" in reasons[2]
    assert all(len(reason.splitlines()) == 1 for reason in reasons)
    exploded = made[2]
    assert isinstance(exploded, opt.Failed)
    assert "but found Float" in exploded.traceback


def test_it_is_a_row_with_its_reason_wherever_rows_are_shown(
    comparison: Comparison, made: list[opt.Variant | opt.Failed]
) -> None:
    assert [row.name for row in comparison.rows[:5]] == ["baseline", *(each.name for each in made)]
    assert comparison.rows[1].measured is not None
    kinds = [row.skip.kind for row in comparison.rows if row.skip]
    assert kinds == ["failed", "failed", "not_applicable"]
    body = json.loads(json.dumps(comparison.results.to_json()))
    frame, html, text = comparison.to_pandas(), comparison._repr_html_(), str(comparison)
    for each, row in zip(made[1:], body["rows"][2:5], strict=True):
        assert isinstance(each, opt.Failed)
        assert row["skip"]["reason"] == frame["skip.reason"][each.name] == each.reason
        assert row["config"]["images"] == 32
        assert each.reason.split("'")[0] in html
        assert re.search(rf"^{each.name}: skipped, .*{re.escape(each.reason)}", text, re.MULTILINE)
    assert comparison.recommendation.name not in {each.name for each in made[1:]}


def test_where_everything_fails_that_is_an_error(base: opt.Variant, made: list[opt.Variant | opt.Failed]) -> None:
    with pytest.raises(opt.PipelineError) as caught:
        opt.compare(base, *made[1:], timing=QUICK)
    lines = str(caught.value).splitlines()
    assert lines[0] == "none of the variants to compare with baseline could be made:"
    assert [line.split(":")[0] for line in lines[1:]] == [each.name for each in made[1:]]
    with pytest.raises(opt.PipelineError, match=r"^ptq-observer-explodes, the reference of this comparison,"):
        opt.compare(made[2], base, timing=QUICK)


def test_what_is_to_be_made_of_what_failed_fails_with_its_reason(made: list[opt.Variant | opt.Failed]) -> None:
    (child,) = opt.apply_each(made[2], {"graph": opt.OnnxInt8()})
    assert isinstance(child, opt.Failed)
    assert child.name == "graph"
    assert child.row.parent == "ptq-observer-explodes"
    assert child.row.skip is not None
    assert child.row.skip.kind == "parent_skipped"
    assert child.reason == "its parent ptq-observer-explodes failed: RuntimeError: expected scalar type Byte"
    for use in (opt.save, opt.package):
        with pytest.raises(opt.UserError, match=r"takes a variant, which load\(\) and apply\(\) return, not <Failed"):
            use(child, "elsewhere")  # type: ignore[arg-type]


def test_what_are_no_settings_is_refused_before_anything_is_made(base: opt.Variant) -> None:
    for wrong in (opt.Ptq(), 3, [opt.Ptq(), "ptq"], {1: opt.Ptq()}):
        with pytest.raises(opt.UserError, match=r"^apply_each takes settings"):
            opt.apply_each(base, wrong)  # type: ignore[arg-type]
    with pytest.raises(opt.UserError, match=r"^apply_each takes a variant"):
        opt.apply_each("base", [opt.Ptq()])  # type: ignore[arg-type]


def test_what_a_file_or_a_full_disk_denies_is_a_reason_too(base: opt.Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    from optimize.passes import base as registry

    for error, reason in (
        (
            FileNotFoundError(2, "No such file", "ranges.json"),
            r"FileNotFoundError: \[Errno 2\] No such file: 'ranges.json'",
        ),
        (OSError(28, "No space left on device"), "no space left on the disk of .*: free some .*"),
    ):

        def fails(*_: object, error: OSError = error) -> Product:
            raise error

        broken = dataclasses.replace(registry.find_pass("ptq"), apply=fails)
        monkeypatch.setitem(registry._REGISTRY._entries, "ptq", broken)
        (failed,) = opt.apply_each(base, [opt.Ptq(images=31)])
        assert isinstance(failed, opt.Failed)
        assert re.fullmatch(reason, failed.reason)


def test_variants_of_one_name_are_called_by_their_parents(
    comparison: Comparison, base: opt.Variant, equal: list[opt.Variant]
) -> None:
    rows = comparison.rows[-3:]
    assert [(row.name, row.parent) for row in rows] == [
        ("fuse", "baseline"),
        ("int8", "baseline"),
        ("fuse-int8", "fuse"),
    ]
    assert all(row.measured and row.pairs[0].id.startswith(f"{row.name}@") for row in rows)
    with pytest.raises(opt.UserError, match="'int8' is given twice"):
        opt.compare(base, *equal, equal[1])


def clip(code: str) -> type[MinMaxObserver]:
    names: dict[str, Any] = {"__name__": "__main__", "MinMaxObserver": MinMaxObserver}
    exec(f"class Clip(MinMaxObserver):\n    share = {code}", names)
    kind: type[MinMaxObserver] = names["Clip"]
    return kind


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (opt.Ptq(), "ptq"),
        (opt.Ptq(observer="minmax", images=64), "ptq-observer-minmax-images-64"),
        (opt.Qat(learning_rate=0.1 + 0.2), "qat-learningrate-0.3"),
        (opt.Qat(learning_rate=1e-5), "qat-learningrate-1e-05"),
        (opt.Ptq(observer=Half), "ptq-observer-half"),
        (opt.Ptq(observer=Half.with_args(share=0.1 + 0.2)), "ptq-observer-half-share-0.3"),
        (opt.Ptq(overrides={"fc": {"observer": Half}}), "ptq-overrides-fc-observer-half"),
        (opt.Ptq(keep_float=("layer1", "Conv2d")), "ptq-keepfloat-layer1-conv2d"),
    ],
)
def test_a_name_says_what_is_not_as_usual(config: Any, name: str) -> None:
    assert step_name(config) == name


def test_long_settings_are_counted_and_told_apart() -> None:
    layers = [f"features.{number}.conv" for number in range(40)]
    names = [step_name(opt.Ptq(keep_float=tuple(layers[:count]))) for count in (39, 40)]
    names.append(step_name(opt.Ptq(keep_float=tuple(reversed(layers)))))
    assert [re.sub("[0-9a-f]{4}$", "", name) for name in names] == [f"ptq-keepfloat-{n}-" for n in (39, 40, 40)]
    assert len(set(names)) == 3


def test_side_by_side_only_what_differs_is_said_and_no_name_twice() -> None:
    configs = [opt.Ptq(images=64, seed=7, observer=each) for each in ("mse", clip("0.5"), clip("0.25"), "mse")]
    assert step_names([*configs, opt.Fuse()]) == [
        "ptq-observer-mse",
        "ptq-observer-clip",
        "ptq-observer-clip-2",
        "ptq-observer-mse-2",
        "fuse",
    ]
    assert step_names([opt.Ptq(images=64)]) == ["ptq-images-64"]
    assert step_names([opt.Ptq(images=64), opt.Ptq()]) == ["ptq-images-64", "ptq"]


SETTINGS = st.builds(
    opt.Qat,
    learning_rate=st.floats(1e-12, 1e3),
    images=st.integers(1, 10**9),
    keep_float=st.lists(st.text(min_size=1, max_size=30), max_size=12).map(tuple),
    overrides=st.dictionaries(st.text(min_size=1, max_size=12), st.just({"observer": "mse"}), max_size=3),
)


@given(st.lists(SETTINGS, min_size=1, max_size=5))
def test_names_of_any_settings_are_legal_and_unique_side_by_side(configs: list[opt.Qat]) -> None:
    names = step_names(configs)
    assert len(set(names)) == len(configs)
    for name in (*names, *map(step_name, configs)):
        assert re.fullmatch(r"[a-z0-9][a-z0-9_.-]{0,63}", name)
