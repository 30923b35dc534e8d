"""The Python API, as the README shows it, on a tiny network."""

from __future__ import annotations

import dataclasses
import html
import inspect
import io
import json
import re
import zipfile
from pathlib import Path
from types import FunctionType
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import BaseModel
from rich.console import Console
from torch import nn
from torch.utils.data import Dataset
from typing_extensions import is_typeddict

import optimize as opt
from optimize.api import Searched
from optimize.data.pixels import decoded
from optimize.data.records import ImageData, Split
from optimize.data.targets import Labels
from optimize.measure.figures import Difference
from optimize.measure.rows import Recommendation, Reference, Row, Skip
from optimize.precision.precision_records import Budget, Figure, Found, Layer, Sensitivity
from optimize.report.columns import columns_of
from serve.archive.archive_file import check_archive
from serve.common.config import Config
from serve.common.progress import ProgressBar
from serve.runtime.card.card import load_card
from serve.runtime.card.execution import Execution
from serve.runtime.errors import UserError
from tests.optimize.picture_files import PICTURE_FILES

pytestmark = pytest.mark.usefixtures("uncompiled")

MODEL = str(Path(__file__).parents[3] / "examples" / "tiny_cnn.py") + ":tiny"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def base(store: Path) -> opt.Variant:
    return opt.load(MODEL, data="digits", store=store, training=opt.Training(epochs=2), device="cpu")


@pytest.fixture(scope="module")
def fused(base: opt.Variant) -> opt.Variant:
    return opt.apply(base, opt.Fuse())


@pytest.fixture(scope="module")
def quantized(fused: opt.Variant) -> opt.Variant:
    return opt.apply(fused, opt.Ptq(observer="minmax", images=64))


@pytest.fixture(scope="module")
def comparison(base: opt.Variant, fused: opt.Variant, quantized: opt.Variant) -> opt.Comparison:
    return opt.compare(base, fused, quantized, timing=opt.Timing(rounds=1, seconds=0.01, batch_sizes=(1, 4)))


def test_every_exported_name_exists_and_is_documented() -> None:
    for name in opt.__all__:
        assert getattr(opt, name).__doc__, name
    assert set(opt.__all__) <= set(dir(opt))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Prune'"):
        _ = opt.Prune


def test_a_variant_is_named_by_the_settings_that_were_given(fused: opt.Variant, quantized: opt.Variant) -> None:
    assert fused.name == "fuse"
    assert quantized.name == "ptq-observer-minmax-images-64"


def test_a_variant_that_was_made_before_comes_from_the_cache(base: opt.Variant, fused: opt.Variant) -> None:
    again = opt.apply(base, opt.Fuse())
    assert again.step.cached
    assert again.artifact.key == fused.artifact.key


def test_comparison_counts_what_the_predictor_gets_right(quantized: opt.Variant, comparison: opt.Comparison) -> None:
    context = quantized.session.context
    pixels, labels = decoded(context.data.val, context.preprocessing), context.data.val.labels
    predictor = quantized.predictor()
    right = sum(
        int(predictor.logits(pixels[index : index + 1]).argmax()) == int(labels[index]) for index in range(len(labels))
    )
    first, _, row = (entry.measured for entry in comparison.rows)
    assert first is not None
    assert row is not None
    assert row.accuracy.score == pytest.approx(right / len(labels))
    change = row.accuracy.score - first.accuracy.score
    assert row.accuracy.difference is not None
    assert row.accuracy.difference.delta == pytest.approx(change)
    assert row.accuracy.difference.gained - row.accuracy.difference.lost == round(change * len(labels))


def test_comparison_prints_as_a_table_and_converts_to_pandas(comparison: opt.Comparison) -> None:
    text = str(comparison)
    frame = comparison.to_pandas()
    for name in ("baseline", "fuse", "ptq-observer-minmax-images-64"):
        assert name in text
        assert frame["latency_ms.p50"][name] > 0
        assert frame["throughput.4"][name] > 0
    assert "eager channels-last" in text
    assert comparison.recommendation.name in frame.index
    assert frame["id"]["fuse"] == f"fuse@{frame['execution.engine']['fuse']}"
    every = comparison.to_pandas(every=True)
    assert set(frame["id"]) <= set(every["id"]) == {pair.id for row in comparison.rows for pair in row.pairs}


def test_a_quantized_variant_may_be_the_first(fused: opt.Variant, quantized: opt.Variant) -> None:
    quick = opt.Timing(rounds=1, seconds=0.01, batch_sizes=(1,))
    table = opt.compare(quantized, fused, timing=quick, max_drop=1.0, objective="size")
    assert [row.name for row in table.rows] == [quantized.name, "fuse"]
    assert table.results.references_of == "fuse"  # the nearest that has an eager module
    assert table.references[0].measured is not None
    assert table.recommendation.name == quantized.name
    first, second = (row.measured for row in table.rows)
    assert first is not None
    assert second is not None
    assert first.accuracy.difference is None
    assert second.accuracy.difference is not None
    assert second.accuracy.difference.delta == pytest.approx(second.accuracy.score - first.accuracy.score)


def test_a_rule_that_does_not_exist_is_refused(fused: opt.Variant) -> None:
    with pytest.raises(UserError, match="objective"):
        opt.compare(fused, objective="beauty")  # type: ignore[arg-type]


def test_a_comparison_is_one_line_in_a_program_a_table_in_a_notebook_and_a_plot_in_a_file(
    comparison: opt.Comparison, tmp_path: Path
) -> None:
    assert repr(comparison) == f"<Comparison 3 artifacts; recommended {comparison.recommendation.pair}>"
    shown = comparison._repr_html_()
    for name in [row.name for row in comparison.rows] + [reference.name for reference in comparison.references]:
        assert f">{name}" in shown.replace("★ ", "")
    measured = comparison.rows[0].measured
    assert measured is not None
    assert f"{measured.accuracy.score * 100:.2f}" in shown
    assert not re.search("<script|<style|https?:", shown)  # of the notebook's own page it touches nothing
    for suffix, begin in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        path = comparison.plot(tmp_path / f"plot{suffix}")
        assert path.read_bytes().startswith(begin)
    with pytest.raises(UserError, match=r"plot.gif: a plot is written as .png or .svg"):
        comparison.plot(tmp_path / "plot.gif")


def test_comparing_a_variant_with_itself_is_refused(base: opt.Variant) -> None:
    with pytest.raises(UserError, match=r"^'baseline' is given twice$"):
        opt.compare(base, base)


def test_variants_of_two_equal_loads_are_compared(base: opt.Variant, quantized: opt.Variant, store: Path) -> None:
    again = opt.load(MODEL, data="digits", store=store, training=opt.Training(epochs=2), device="cpu")
    table = opt.compare(again, quantized, timing=opt.Timing(rounds=1, seconds=0.005, batch_sizes=(1,)))
    assert [row.name for row in table.rows] == ["baseline", quantized.name]


def test_variants_that_differ_in_what_must_be_shared_are_not_compared(base: opt.Variant, store: Path) -> None:
    other = opt.load(MODEL, data="digits", store=store, training=opt.Training(epochs=1), device="cpu", image_size=24)
    with pytest.raises(UserError, match=r"^baseline cannot be compared with baseline: they differ in preprocessing$"):
        opt.compare(base, other)


def test_a_wrong_argument_says_what_was_given_and_what_would_be_right(base: opt.Variant) -> None:
    with pytest.raises(opt.UserError, match=r"such as opt.Ptq\(\), not 'ptq' \(str\)"):
        opt.apply(base, "ptq")  # type: ignore[arg-type]
    with pytest.raises(opt.UserError, match=r"unknown pass 'ptqq' \(did you mean ptq"):
        opt.apply(base, "ptqq")  # type: ignore[arg-type]
    with pytest.raises(opt.UserError, match=r"apply takes a variant.*not 3 \(int\)"):
        opt.apply(3, opt.Fuse())  # type: ignore[arg-type]
    with pytest.raises(opt.UserError, match=r"compare takes variants.*not 'ptq'"):
        opt.compare(base, "ptq")  # type: ignore[arg-type]


def test_predict_takes_bytes_a_file_or_a_picture_one_or_many(quantized: opt.Variant, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    picture = Image.fromarray(pixels)
    file = tmp_path / "picture.png"
    picture.save(file)
    expected = quantized.predictor().predict([file.read_bytes()], 3)[0]
    assert quantized.predict(file.read_bytes(), k=3) == expected
    assert (
        quantized.predict(file, k=3) == quantized.predict(str(file), k=3) == quantized.predict(picture, k=3) == expected
    )
    assert quantized.predict([picture, file, file.read_bytes()], k=3) == [expected] * 3
    assert quantized.predict(picture.convert("CMYK"))  # a mode that PNG lacks


@pytest.mark.parametrize("kind", PICTURE_FILES)
def test_predict_answers_a_picture_as_its_file(quantized: opt.Variant, kind: str) -> None:
    file = PICTURE_FILES[kind]
    if kind.startswith("32"):
        for given in (file, Image.open(io.BytesIO(file))):
            with pytest.raises(opt.UserError, match="set the value of white with pixel_max"):
                quantized.predict(given)
        return
    assert quantized.predict(Image.open(io.BytesIO(file))) == quantized.predict(file)


def test_predict_names_what_cannot_be_classified(quantized: opt.Variant, tmp_path: Path) -> None:
    (tmp_path / "text.jpg").write_text("no image")
    with pytest.raises(opt.UserError, match=r"absent.png: cannot be read"):
        quantized.predict(tmp_path / "absent.png")
    with pytest.raises(opt.UserError, match=r"text.jpg: not an image"):
        quantized.predict([str(tmp_path / "text.jpg")])
    half = Image.open(io.BytesIO(PICTURE_FILES["turned"][:-200]))
    with pytest.raises(opt.UserError, match=r"^image 1: the image is truncated or broken"):
        quantized.predict([Image.new("RGB", (8, 8)), half])


@pytest.mark.parametrize("images", [3, None, 2.5, {"a": 1}, [b"x", 3]])
def test_what_is_no_image_is_refused_in_one_line_that_says_what_is(quantized: opt.Variant, images: Any) -> None:
    with pytest.raises(opt.UserError) as caught:
        quantized.predict(images)
    said = str(caught.value)
    assert said.startswith("images: must be encoded bytes, a file path, a PIL image, or a list of these, not ")
    assert said.endswith(f"{images!r} ({type(images).__name__})")


@pytest.mark.parametrize("k", [0, -1, "x", True, 2.0, None])
def test_a_number_of_classes_that_is_none_is_refused_in_one_line(quantized: opt.Variant, k: Any) -> None:
    with pytest.raises(opt.UserError) as caught:
        quantized.predict(Image.new("RGB", (8, 8)), k=k)
    assert str(caught.value) == f"k must be a whole number from 1 to 999999999, got {str(k)!r}"


def test_a_parameter_that_the_task_does_not_have_is_named(quantized: opt.Variant) -> None:
    with pytest.raises(opt.UserError) as caught:
        quantized.predict(Image.new("RGB", (8, 8)), top=3)
    assert str(caught.value) == "top: classification has no such parameter (it has k)"


#: Of a small network on digits: what a float module costs in int8, and what a search for precisions found.
SENSITIVITY = Sensitivity(
    title="tiny on digits",
    task="classification",
    parent="fuse",
    config={},
    execution=Execution("openvino"),
    runs_on="openvino",
    images=359,
    score=0.9,
    p50=5.0,
    whole=Figure(
        score=0.7, difference=Difference(delta=-0.2, low=-0.21, high=-0.19, gained=0, lost=72), sqnr_db=21.25,
        p50=3.0, won_ms=2.0,
    ),
    layers=(Layer(name="stem", weights=1728, alone=Skip(kind="failed", reason="no <kernel>"), all_but=Skip(
        kind="failed", reason="no kernel")),),
    timing=opt.Timing(),
    cpu="Imaginary CPU",
)  # fmt: skip
FOUND = Found(
    title="tiny on digits",
    task="classification",
    budget=Budget(max_drop=0.01, max_latency_ms=None, bits=(8, 32)),
    method="greedy",
    layers=2,
    chose=180,
    trials=(),
    pair="mixed@openvino",
    execution=Execution("openvino"),
    bits={"stem": 32, "head": 8},
    p50=3.0,
    judged=None,
    fastest_float="onnx@openvino",
    fastest_float_p50=5.0,
    why=("it is faster", "it keeps the budget"),
    stages=(),
    timing=opt.Timing(),
    cpu="Imaginary CPU",
)


def public_types() -> set[type]:
    """Classes that a program gets in its hands: the API's own, what its functions return, and what these hold."""
    waiting: list[Any] = [getattr(opt, name) for name in opt.__all__]
    found: set[type] = set()
    while waiting:
        entry = waiting.pop()
        if isinstance(entry, FunctionType):
            waiting.append(get_type_hints(entry)["return"])
        elif not isinstance(entry, type) or get_args(entry):
            waiting += get_args(entry)
        elif entry.__module__.split(".")[0] in ("optimize", "serve") and entry not in found:
            if issubclass(entry, BaseException) or getattr(entry, "_is_protocol", False) or is_typeddict(entry):
                continue
            found.add(entry)
            # An alias of `optimize.data.sources` names these in a string.
            names = {"Path": Path, "np": np, "npt": np.typing}
            held = (
                get_type_hints(entry, localns=names)
                if dataclasses.is_dataclass(entry) or issubclass(entry, BaseModel)
                else {}
            )
            properties = {
                name: get_type_hints(getter)["return"]
                for name, value in inspect.getmembers(entry)
                if isinstance(value, property)
                and (getter := value.fget)
                and getter.__module__.startswith(("optimize", "serve"))
            }
            waiting += [kind for name, kind in (held | properties).items() if not name.startswith("_")]
    return found


def test_every_public_object_has_a_line_and_an_html_form_of_its_own() -> None:
    found = public_types()
    assert {opt.Variant, opt.Comparison, Searched, Sensitivity, Found, Row, Reference, Recommendation} <= found
    assert not [kind for kind in found if not hasattr(kind, "_repr_html_")]
    shown = [kind for kind in found if not issubclass(kind, Config)]  # which says of itself what was given
    borrowed: tuple[Any, ...] = (object.__repr__, BaseModel.__repr__)
    assert not [kind for kind in shown if kind.__repr__ in borrowed]


def test_what_a_comparison_or_a_search_gives_is_a_line_and_a_table_that_says_more(comparison: opt.Comparison) -> None:
    chosen = comparison.recommendation
    row, reference = comparison.rows[-1], comparison.references[0]
    assert row.best is not None
    assert row.measured is not None
    assert reference.measured is not None
    top1 = f"{row.measured.accuracy.score * 100:.2f} % of {row.measured.accuracy.images}"
    shown: list[tuple[Any, tuple[str, ...], tuple[str, ...]]] = [
        (chosen, (str(chosen.pair), f"{len(chosen.rejected)} others"), (chosen.rule, *chosen.rejected)),
        (row, (row.name, "ptq", "fuse", row.best.id, top1), ("torchscript",)),
        (row.best, (row.best.id, top1, f"{row.measured.latency_ms.p50:.4g} ms"), ()),
        (row.measured, (top1,), ()),
        (reference, (reference.name, f"{reference.measured.latency_ms.p50:.4g} ms"), ()),
        (comparison.results, (comparison.results.title, str(chosen.pair)), ()),
        (SENSITIVITY, ("tiny on digits", "openvino", "90.00 %", "−20.00 points"), ("stem", "no &lt;kernel&gt;")),
        (Searched(FOUND, None), ("mixed@openvino", "onnx@openvino", "greedy"), ("stem 32", *FOUND.why)),
        (FOUND, ("mixed@openvino",), FOUND.why),
        (comparison, (str(chosen.pair),), ()),
    ]
    for held, facts, more in shown:
        text, table = repr(held), held._repr_html_()
        assert "\n" not in text
        assert len(text) < 400
        for fact in facts:
            assert fact in text
        for fact in (*facts, *more):
            assert fact in html.unescape(table) or fact in table


def test_whatever_a_program_holds_is_one_line_and_a_small_table(quantized: opt.Variant) -> None:
    session, artifact = quantized.session, quantized.artifact
    data = session.context.data
    used = "resize 32, crop 32x32"
    shown: list[tuple[Any, tuple[str, ...]]] = [
        (quantized, (quantized.name, "int8", "digits", used, "(your PREPROCESSING in tiny_cnn.py)")),
        (session, (session.source.name, "digits", "cpu", str(session.store.root), used, "not mirrored")),
        (quantized.step, (artifact.name,)),
        (session.context, ("digits", "cpu", "3 × 32 × 32")),
        (session.store, (str(session.store.root),)),
        (artifact.card, (artifact.name, "torchscript", "int8")),
        (artifact, (artifact.name, "torchscript", "int8", "fuse", str(artifact.folder))),
        (data, ("digits", "10 (0, 1, 2, …)", str(len(data.train)), str(len(data.val)), "8 × 8")),
        (data.val, (str(len(data.val)),)),
        (quantized.predictor(), (artifact.name, "torchscript", "cpu", "32 × 32", "10")),
    ]
    for held, facts in shown:
        text, table = repr(held), held._repr_html_()
        assert "\n" not in text
        assert len(text) < 600, "none of what it holds, but for where its preprocessing is from"
        assert len(table) < 1500
        assert table.startswith("<table><tr><th>")
        for fact in facts:
            assert fact in text
            assert fact in table


def test_settings_tell_what_was_given_in_a_line_and_all_of_it_in_a_notebook() -> None:
    assert repr(opt.Fuse()) == "Fuse()"
    assert repr(opt.Ptq(images=64)) == "Ptq(images=64)"
    assert repr(opt.Qat(epochs=1)) == "Qat(epochs=1)", "what follows from it was not given"
    assert repr(opt.Ptq(images=opt.Ptq().images)) == "Ptq()"
    # What is shown makes the same again.
    for config in (opt.Ptq(images=64, observer="minmax"), opt.Timing(batch_sizes=(1, 4)), opt.ServingOptions(k=3)):
        assert eval(repr(config), {type(config).__name__: type(config)}) == config
    table = opt.Ptq(images=64)._repr_html_()
    assert "<th>images</th><td>64 (usually 256)</td><td>" in table
    for name, field in opt.Ptq.model_fields.items():
        assert f"<th>{name}</th>" in table
        assert field.description
        assert html.escape(field.description) in table


def test_a_table_shows_text_as_it_is_and_of_many_names_the_first() -> None:
    split = Split((), Labels(torch.zeros(0, dtype=torch.int64)))
    names = ("<b>", "x" * 500, "c", *(f"n{number}" for number in range(1000)))
    data = ImageData("a&b", "classification", names, split, split, "none", None)
    assert "<td>a&amp;b</td>" in data._repr_html_()
    assert "1003 (&lt;b&gt;, xxxxxxxxxxxxxxxxxxx…, c, …)" in data._repr_html_()


class Corner(nn.Module):
    """Tells which quarter of a ``(N, 3, 8, 8)`` image is brightest: right without any training."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.AvgPool2d(4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.pool(images).mean(1).flatten(1)


class Quarters(Dataset[tuple[torch.Tensor, int]]):
    """Images of noise with one bright quarter, whose number is their class."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index >= len(self):
            raise IndexError
        label = index % 4
        image = torch.randint(0, 100, (3, 8, 8), generator=torch.Generator().manual_seed(index), dtype=torch.uint8)
        image[:, label // 2 * 4 : label // 2 * 4 + 4, label % 2 * 4 : label % 2 * 4 + 4] += 100
        return image, label


def test_a_module_and_a_dataset_of_a_program_are_taken_as_they_are(tmp_path: Path) -> None:
    eight = opt.PreprocessingConfig(resize=8, crop=8, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    base = opt.load(Corner(), data=Quarters(), preprocessing=eight, store=tmp_path, device="cpu")
    table = opt.compare(base, timing=opt.Timing(rounds=1, seconds=0.005, batch_sizes=(1,)))
    assert table.to_pandas().loc["baseline", "accuracy.top1"] == 1.0
    picture = Image.fromarray(Quarters()[2][0].permute(1, 2, 0).numpy())
    assert base.predict(picture, k=1)[0].index == 2
    # Prepared floats, with the statement of what was done to them, are the same images.
    stated = opt.Preprocessing(8, (8, 8), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    floats = [((image / 255 - 0.5) / 0.5, label) for image, label in (Quarters()[index] for index in range(40))]
    data = opt.image_data(floats, classes=("a", "b", "c", "d"), preprocessing=stated)
    again = opt.load(Corner(), data=data, store=tmp_path, device="cpu")
    assert again.predict(picture, k=1)[0].label == "c"


@pytest.fixture
def quarters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`Quarters` as a folder of files: 32 to train with, 8 to measure with."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for row in range(40):
        image, label = Quarters()[row]
        path = tmp_path / "quarters" / ("val" if row % 5 == 0 else "train") / str(label) / f"{row}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
    return tmp_path / "quarters"


def test_load_takes_what_the_command_line_takes_of_the_data(quarters: Path, tmp_path: Path) -> None:
    def load(**options: Any) -> ImageData:
        loaded = opt.load(Corner(), data=f"imagefolder:{quarters}", store=tmp_path / "store", device="cpu", **options)
        return loaded.session.context.data

    names = ("up left", "up right", "down left", "down right")
    (tmp_path / "names.txt").write_text("\n".join(names))
    data = load(classes=names, augment="none", val_images=4)
    assert (data.classes, data.augment, len(data.val), data.val_of) == (names, "none", 4, 8)
    assert sorted(data.val.labels.tolist()) == [0, 1, 2, 3]
    for file in (str(tmp_path / "names.txt"), tmp_path / "names.txt"):
        assert load(classes=file).classes == names
    usual = load()
    assert (usual.classes, usual.augment, len(usual.val)) == (("0", "1", "2", "3"), "shift", 8)
    for options, message in (
        ({"classes": ["a", "b"]}, r"classes: has 2 names, and quarters has 4 classes"),
        ({"augment": "flip"}, r"there is no augmentation 'flip'"),
        ({"val_images": 0}, r"val_images: .* 1 \(it is 0\)"),
    ):
        with pytest.raises(UserError, match=message):
            load(**options)


def test_what_refuses_unreadable_images_names_the_remedy_in_python_too(quarters: Path, tmp_path: Path) -> None:
    (quarters / "val" / "0" / "0.png").write_bytes(b"not a picture")

    def measured(**options: Any) -> int:
        loaded = opt.load(Corner(), data=f"imagefolder:{quarters}", store=tmp_path / "store", device="cpu", **options)
        return sum(len(labels) for _, labels in loaded.session.context.evaluation(8, torch.device("cpu")))

    with pytest.raises(UserError, match=r"0\.png.*--skip-unreadable \(skip_unreadable=True in Python\)"):
        measured()
    assert measured(skip_unreadable=True) == 7


def test_a_programmer_is_told_which_preprocessing_is_used_and_how_far_the_data_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Seen:
        def __init__(self) -> None:
            self.bars: list[tuple[str, str]] = []
            self.lines: list[str] = []

        def draw(self, name: str, fraction: float, text: str) -> None:
            self.bars.append((name, text.partition(" · ")[0]))

        def clear(self) -> None: ...

        def say(self, line: str) -> None:
            self.lines.append(line)

    seen = Seen()
    monkeypatch.setattr(
        "serve.common.progress._EVERY_S", -60.0
    )  # each word: the timer may have drawn since `now` was read
    monkeypatch.setattr("serve.common.progress.here", lambda: ProgressBar(seen, after_s=0.0))
    monkeypatch.setattr("optimize.api.making.here", lambda: ProgressBar(seen, after_s=0.0))
    data = opt.image_data(Quarters(), augment="shift+flip")
    assert ("reading", "images") in seen.bars
    del seen.bars[:]
    opt.load(Corner(), data=Quarters(), store=tmp_path, device="cpu")
    assert ("reading", "images") in seen.bars
    base = opt.load(Corner(), data=data, store=tmp_path, device="cpu")
    whose = "ImageNet's mean and std, because your model declares none"
    for told in (repr(base), repr(base.session), html.unescape(base._repr_html_()), *seen.lines[:1]):
        assert "resize 8, crop 8x8 (the data's images are 8x8)" in told
        assert f"mean 0.485,0.456,0.406, std 0.229,0.224,0.225 ({whose})" in told
    assert [line for line in seen.lines if line.startswith("training images are shifted and mirrored at random")]
    assert "mirrored at random" in repr(base.session)


def test_a_printed_comparison_has_every_column_that_there_is_room_for(
    comparison: opt.Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = [column.head for column in columns_of(comparison.results)]
    whole = str(comparison)
    assert [head for head in heads if head not in whole] == []  # the output of a test is no terminal
    monkeypatch.setattr("optimize.report.console.output", lambda: Console(width=100))
    narrow = str(comparison)
    assert [head for head in heads if head not in narrow]
    assert max(map(len, narrow.splitlines())) <= 100


def test_a_module_with_a_checkpoint_beside_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(opt.UserError, match="a module has its weights already"):
        opt.load(Corner(), checkpoint="weights.pt", store=tmp_path)


def test_comparing_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="at least one"):
        opt.compare()


def test_a_pass_that_cannot_follow_is_refused_with_the_reason(quantized: opt.Variant) -> None:
    with pytest.raises(UserError, match=r"qat takes a float module, not a quantized \(int8\) module"):
        opt.apply(quantized, opt.Qat())


def test_a_saved_variant_is_a_whole_artifact(quantized: opt.Variant, tmp_path: Path) -> None:
    folder = opt.save(quantized, tmp_path / "out" / "ptq")
    card = load_card(folder)
    assert card == quantized.artifact.card
    module = torch.jit.load(str(folder / card.file))
    assert module(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    with pytest.raises(UserError, match="exists already"):
        opt.save(quantized, folder)


def test_a_saved_variant_is_taken_back_here_and_into_another_store(
    base: opt.Variant, fused: opt.Variant, quantized: opt.Variant, tmp_path: Path
) -> None:
    picture = Image.fromarray(np.random.default_rng(1).integers(0, 256, (32, 32, 3), dtype=np.uint8))
    folder = opt.save(quantized, tmp_path / "ptq")
    assert opt.restore(base, folder).artifact.key == quantized.artifact.key
    module = opt.save(fused, tmp_path / "fused")
    other = opt.load(MODEL, data="digits", store=tmp_path / "other", training=opt.Training(epochs=1), device="cpu")
    assert opt.restore(other, folder).predict(picture) == quantized.predict(picture)
    again = opt.apply(opt.restore(other, module), opt.Ptq(observer="minmax", images=64))
    assert again.predict(picture) == quantized.predict(picture)  # a pass goes on from a module that was taken back


def test_a_packaged_variant_is_an_archive_with_its_card(quantized: opt.Variant, tmp_path: Path) -> None:
    archive = opt.package(quantized, tmp_path / "tiny-ptq.mar")
    card = check_archive(archive)
    assert card.name == quantized.name
    assert card.lineage == quantized.artifact.card.lineage
    assert set(card.files) == {card.file}


def test_a_packaged_variant_is_served_as_its_options_say(quantized: opt.Variant, tmp_path: Path) -> None:
    options = opt.ServingOptions(workers=2, threads=1, k=3)
    with zipfile.ZipFile(opt.package(quantized, tmp_path / "x.mar", options=options)) as archive:
        served = json.loads(archive.read("serving.json"))
    assert (served["workers"], served["k"]) == (2, 3)
    assert [(entry["engine"], entry["threads"]) for entry in served["executions"]] == [("torchscript", 1)]
