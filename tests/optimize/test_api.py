"""The Python API, as the README shows it, on a tiny network."""

from __future__ import annotations

import html
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

import optimize as opt
from optimize.data.pixels import decoded
from optimize.data.records import ImageData, Split
from serve.runtime.card import load_card
from serve.runtime.errors import UserError
from serve.torchserve.archive_file import check_archive

pytestmark = pytest.mark.usefixtures("uncompiled")

MODEL = str(Path(__file__).parents[2] / "examples" / "tiny_cnn.py") + ":tiny"


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
    assert row.accuracy.top1 == pytest.approx(right / len(labels))
    change = row.accuracy.top1 - first.accuracy.top1
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
    assert second.accuracy.difference.delta == pytest.approx(second.accuracy.top1 - first.accuracy.top1)


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
    assert f"{measured.accuracy.top1 * 100:.2f}" in shown
    assert not re.search("<script|<style|https?:", shown)  # of the notebook's own page it touches nothing
    for suffix, begin in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        path = comparison.plot(tmp_path / f"plot{suffix}")
        assert path.read_bytes().startswith(begin)
    with pytest.raises(UserError, match=r"plot.gif: a plot is written as .png or .svg"):
        comparison.plot(tmp_path / "plot.gif")


def test_comparing_two_variants_of_one_name_is_refused(base: opt.Variant) -> None:
    with pytest.raises(UserError, match="two variants are called 'baseline'"):
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
    with pytest.raises(opt.UserError, match=r"such as opt.Ptq\(\), and not 'ptq' \(str\)"):
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


def test_predict_names_what_cannot_be_classified(quantized: opt.Variant, tmp_path: Path) -> None:
    (tmp_path / "text.jpg").write_text("no image")
    with pytest.raises(opt.UserError, match=r"absent.png: cannot be read"):
        quantized.predict(tmp_path / "absent.png")
    with pytest.raises(opt.UserError, match=r"text.jpg: not an image"):
        quantized.predict([str(tmp_path / "text.jpg")])


@pytest.mark.parametrize("images", [3, None, 2.5, {"a": 1}, [b"x", 3]])
def test_what_is_no_image_is_refused_in_one_line_that_says_what_is(quantized: opt.Variant, images: Any) -> None:
    with pytest.raises(opt.UserError) as caught:
        quantized.predict(images)
    said = str(caught.value)
    assert said.startswith("images: must be encoded bytes, a file's path, a PIL image, or a list of such, and not ")
    assert said.endswith(f"{images!r} ({type(images).__name__})")


@pytest.mark.parametrize("k", [0, -1, "x", True, 2.0, None])
def test_a_number_of_classes_that_is_none_is_refused_in_one_line(quantized: opt.Variant, k: Any) -> None:
    with pytest.raises(opt.UserError) as caught:
        quantized.predict(Image.new("RGB", (8, 8)), k=k)
    assert str(caught.value) == f"k: must be a whole number of at least 1 (it is {k!r})"


def test_whatever_a_program_holds_is_one_line_and_a_small_table(quantized: opt.Variant) -> None:
    session, artifact = quantized.session, quantized.artifact
    data = session.context.data
    shown: list[tuple[Any, tuple[str, ...]]] = [
        (quantized, (quantized.name, "int8", "digits")),
        (session, (session.source.name, "digits", "cpu", str(session.store.root))),
        (artifact, (artifact.name, "torchscript", "int8", "fuse", str(artifact.folder))),
        (data, ("digits", "10 (0, 1, 2, …)", str(len(data.train)), str(len(data.val)), "8 × 8")),
        (data.val, (str(len(data.val)),)),
        (quantized.predictor(), (artifact.name, "torchscript", "cpu", "32 × 32", "10")),
    ]
    for held, facts in shown:
        text, table = repr(held), held._repr_html_()
        assert "\n" not in text
        assert len(text) < 400, "none of what it holds"
        assert len(table) < 1000
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
    split = Split((), torch.zeros(0, dtype=torch.int64))
    names = ("<b>", "x" * 500, "c", *(f"n{number}" for number in range(1000)))
    data = ImageData("a&b", names, split, split, "none", None)
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


def test_a_module_with_a_checkpoint_beside_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(opt.UserError, match="a module brings its weights"):
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
