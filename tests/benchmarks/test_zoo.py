"""The zoo's machinery: caps that hold, records that survive, weights that answer, a page that counts."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
import time
from datetime import date
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

from benchmarks.zoo import __main__ as zoo
from benchmarks.zoo import stream, watch, weights
from benchmarks.zoo.agreement import compared, disagreeing
from benchmarks.zoo.names import family, torchvision_names
from benchmarks.zoo.page import page
from benchmarks.zoo.record import Agreement, ModelRecord, Passed, Signal, Speed, read, read_all, write, write_all
from benchmarks.zoo.stages import STAGES, Model, Settings
from benchmarks.zoo.stream import RoundedSums, branch_ends
from benchmarks.zoo.watch import Ended, run
from benchmarks.zoo.weights import fit_head, initialise
from optimize.errors import PassError
from tests.optimize import families

MIB = 1 << 20


@pytest.fixture(autouse=True)
def closely(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is watched here is not timed: a look that took long on a busy machine does not put off the next."""
    monkeypatch.setattr(watch, "_SHARE", 1.0)


def watched(tmp_path: Path, code: str, *, memory: int = 4 << 30, seconds: float = 60):
    return run([sys.executable, "-c", code], memory=memory, seconds=seconds, log=tmp_path / "log")


def test_a_command_that_ends_well_is_not_complained_of(tmp_path: Path) -> None:
    ended = watched(tmp_path, "import time; held = bytearray(60 << 20); time.sleep(1.2)")
    assert ended.reason is None
    assert 60 * MIB < ended.peak_bytes < 200 * MIB
    assert ended.seconds >= 1.2


def test_the_memory_of_its_children_counts_and_all_are_ended(tmp_path: Path) -> None:
    code = f"""
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; held = bytearray(300 << 20); time.sleep(60)"])
pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(child.pid))
time.sleep(60)
"""
    ended = watched(tmp_path, code, memory=200 * MIB)
    assert ended.reason == "needed more than 0 GiB of memory"
    assert ended.seconds < 30
    child = Path("/proc") / (tmp_path / "pid").read_text()
    assert not child.exists() or "State:\tZ" in (child / "status").read_text()


def test_a_command_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    ended = watched(tmp_path, "import time; time.sleep(60)", seconds=1)
    assert ended.reason == "took more than 0 minutes"
    assert ended.seconds < 10


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import sys; print('what it was'); sys.exit(3)", "its process ended with code 3: what it was"),
        ("import os; os.kill(os.getpid(), 9)", "its process ended by signal 9: it said nothing"),
    ],
)
def test_how_a_command_died_is_said(tmp_path: Path, code: str, reason: str) -> None:
    assert watched(tmp_path, code).reason == reason


def test_a_model_whose_process_is_killed_goes_on_behind_that_stage(tmp_path: Path, monkeypatch) -> None:
    """The stand-in for a model's process does a stage a time, and dies in one."""
    child = f"""
import json, os, sys
from pathlib import Path
file = Path(sys.argv[sys.argv.index("--record") + 1])
record = json.loads(file.read_text()) if file.exists() else {{"name": "resnet18", "family": "resnet", "stages": {{}}}}
for stage in {STAGES!r}:
    if stage in record["stages"]:
        continue
    file.write_text(json.dumps(record | {{"running": stage}}))
    if stage == "ptq":
        os.kill(os.getpid(), 9)
    record["running"], record["stages"][stage] = None, {{"status": "ok"}}
    file.write_text(json.dumps(record))
"""
    (tmp_path / "child.py").write_text(child)
    started = []

    def stand_in(command, **options):
        started.append(command)
        return run([sys.executable, str(tmp_path / "child.py"), *command[3:]], **options)

    monkeypatch.setattr(zoo, "run", stand_in)
    words = ["resnet18", "--records", str(tmp_path / "records"), "--store", str(tmp_path / "store")]
    assert zoo.main([*words, "--known", str(tmp_path / "zoo.json"), "--write", str(tmp_path / "zoo.md")]) == 0
    (record,) = read_all(tmp_path / "zoo.json")
    assert len(started) == 2
    assert list(record.stages) == list(STAGES)
    assert [name for name, stage in record.stages.items() if stage.status != "ok"] == ["ptq"]
    assert record.stages["ptq"].reason == "its process ended by signal 9: it said nothing"
    text = (tmp_path / "zoo.md").read_text()
    assert "**0 of 80 torchvision classifiers pass every stage.** 1 of 80 went through all stages so far" in text
    assert zoo.main(words) == 0
    assert len(started) == 2  # nothing is done again


@pytest.mark.parametrize("fits", [True, False])
def test_executions_that_are_too_much_together_are_timed_one_after_another(fits, tmp_path: Path, monkeypatch) -> None:
    done = Passed(status="ok", seconds=1.0)
    untimed = whole("resnet18").model_copy(update={"stages": dict.fromkeys(STAGES[:-1], done)})
    write(untimed, tmp_path / "resnet18.json")
    asked = []

    def stand_in(command, *, memory, **_):
        asked.append(Settings.from_json(command[command.index("--settings") + 1]).large)
        if asked[-1] or not fits:
            return Ended(f"needed more than {memory >> 30} GiB of memory", memory + 1, 1.0)
        timed = {**untimed.stages, "speed": done}
        write(untimed.model_copy(update={"stages": timed}), tmp_path / "resnet18.json")
        return Ended(None, memory - 1, 1.0)

    monkeypatch.setattr(zoo, "run", stand_in)
    assert zoo.main(["resnet18", "--records", str(tmp_path), "--store", str(tmp_path / "store")]) == 0
    assert asked == [Settings().large, 0]
    record = read(tmp_path / "resnet18.json")
    assert record is not None
    assert record.stages["speed"].status == ("ok" if fits else "failed")


def test_what_is_known_is_not_made_again_and_says_when_it_was(tmp_path: Path, monkeypatch) -> None:
    known = whole("resnet18", made_on=date(2020, 2, 3), made_with="a machine, torch 2.0")
    write_all([known], tmp_path / "zoo.json")
    monkeypatch.setattr(zoo, "run", lambda *_, **__: pytest.fail("it is known"))
    words = ["resnet18", "--records", str(tmp_path / "records"), "--store", str(tmp_path / "store")]
    assert zoo.main([*words, "--known", str(tmp_path / "zoo.json"), "--write", str(tmp_path / "zoo.md")]) == 0
    assert read_all(tmp_path / "zoo.json") == [known]
    assert "Made by `make zoo` on 2020-02-03. " in (text := (tmp_path / "zoo.md").read_text())
    assert "\n- a machine, torch 2.0\n" in text


def test_no_stage_is_begun_when_the_time_is_over(tmp_path: Path, monkeypatch) -> None:
    started = []
    monkeypatch.setattr(zoo, "run", lambda command, **options: started.append(command))
    assert zoo.main(["resnet18", "--records", str(tmp_path), "--store", str(tmp_path / "store"), "--limit", "0"]) == 0
    assert not started
    record = ModelRecord(name="resnet18", family="resnet")
    kept: list[ModelRecord] = []
    assert Model("resnet18", tmp_path, Settings(), record, kept.append, until=time.monotonic()).run() == record
    assert not kept


def test_what_goes_on_later_keeps_its_size_and_what_was_said_of_its_weights(tmp_path: Path) -> None:
    kept: list[ModelRecord] = []
    first = Settings(image_size=64, calibration=16, judging=8, fitting=16)
    began = Model("shufflenet_v2_x0_5", tmp_path / "store", first, whole("x", stages={}), kept.append)
    began._stage("baseline")
    assert (kept[-1].weights, kept[-1].image_size) == (began.record.weights, 64)
    told = began.record.model_copy(update={"weights": "random, trained for 4 epochs"})
    other = dataclasses.replace(first, image_size=96)
    again = Model("shufflenet_v2_x0_5", tmp_path / "store", other, told, kept.append)
    again._stage("baseline")
    assert again._session.context.preprocessing.crop == (64, 64)
    assert (again.record.weights, again.record.image_size) == ("random, trained for 4 epochs", 64)


class Steep(nn.Module):
    """A network that large steps of SGD lead to infinity, and Adam's, which are as long wherever, do not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Conv2d(3, 16, 5, stride=4), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layer(x).square().mul(100).square().mean((2, 3)))
        return logits


def test_a_network_that_sgd_would_break_is_strengthened_by_adam(tmp_path: Path) -> None:
    torch.manual_seed(0)
    settings = Settings(image_size=64, calibration=16, judging=8, fitting=64)
    kept: list[ModelRecord] = []
    model = Model("shufflenet_v2_x0_5", tmp_path / "store", settings, whole("x", stages={}), kept.append)
    found = model._strengthened(module := Steep().eval(), Signal(image_share=0, rounding_db=-60, top1=0, images=8))
    assert all(value.isfinite().all() for value in module.state_dict().values())
    assert math.isfinite(found.rounding_db)
    assert model.record.weights.startswith("random, trained for ")


def test_what_is_lacking_is_made_from_no_more_than_it_goes_on_from(tmp_path: Path) -> None:
    """The store was removed when the model was done."""
    ok = Passed(status="ok", seconds=1.0)
    stages = {stage: ok for stage in STAGES if stage not in ("onnx", "speed")}
    known = ModelRecord(name="shufflenet_v2_x0_5", family="shufflenet", image_size=64, stages=stages)
    settings = Settings(image_size=96, calibration=16, judging=8, fitting=16, speed=False)
    model = Model(known.name, tmp_path / "store", settings, known, lambda _: None)
    record = model.run()
    assert set(model.steps) == {"baseline", "fuse", "onnx"}
    assert (record.stages["onnx"].status, record.image_size) == ("ok", 64)
    assert {stage: passed for stage, passed in record.stages.items() if stage != "onnx"} == stages
    failed = known.model_copy(update={"stages": {**stages, "fuse": Passed(status="failed", reason="it broke")}})
    record = Model(known.name, tmp_path / "store", settings, failed, lambda _: None).run()
    assert (record.stages["onnx"].status, record.stages["onnx"].reason) == ("not made", "there is no fuse")


def test_each_stage_of_a_large_network_has_a_process_of_its_own(tmp_path: Path) -> None:
    settings = Settings(image_size=64, calibration=16, judging=8, fitting=16, large=0)
    record, kept = ModelRecord(name="shufflenet_v2_x0_5", family="shufflenet"), list[ModelRecord]()
    for stages in (["baseline"], ["baseline", "fuse"]):
        record = Model(record.name, tmp_path / "store", settings, record, kept.append).run()
        assert list(record.stages) == stages
        assert {stage.status for stage in record.stages.values()} == {"ok"}


def test_the_zoo_has_all_of_torchvisions_classifiers_and_refuses_others(capsys) -> None:
    names = torchvision_names()
    assert len(names) == 80
    assert {"vit_h_14", "regnet_y_128gf", "googlenet", "maxvit_t"} < set(names)
    assert (family("swin_v2_t"), family("wide_resnet50_2"), family("mobilenet_v2")) == (
        "swin_v2",
        "wide_resnet",
        "mobilenet_v2",
    )
    assert zoo.main(["resnet17"]) == 2
    assert "the zoo has no 'resnet17'" in capsys.readouterr().err


def test_the_file_of_all_records_does_not_lie_among_those_of_single_models(tmp_path: Path, capsys) -> None:
    known = tmp_path / "zoo.json"
    assert zoo.main(["resnet18", "--records", str(tmp_path), "--known", str(known)]) == 2
    assert f"error: --known {known}: each file in --records is read as one model's" in capsys.readouterr().err


def whole(name: str, **changes: object) -> ModelRecord:
    agreed = (
        Agreement(engine="reference program", reference="float", top1=0.9, sqnr_db=18.25, images=64),
        Agreement(engine="onnxruntime", reference="integers", top1=1.0, sqnr_db=30.0, images=64),
        Agreement(engine="openvino", reference="integers", top1=0.984375, sqnr_db=28.5, images=64),
    )
    stages = {stage: Passed(status="ok", seconds=1.0, bytes=1000) for stage in STAGES}
    stages["onnx-int8"] = Passed(status="ok", seconds=2.0, bytes=260)
    stages["agreement"] = Passed(status="ok", seconds=2.0, agreements=agreed)
    record = ModelRecord(
        image_size=64,
        name=name,
        family=family(name),
        weights="random",
        parameters=11_000_000,
        signal=Signal(
            image_share=0.25, rounding_db=31.5, top1=0.75, images=64, weights_rounded=True, pooled_rounded=True
        ),
        stages=stages,
        speed=Speed(int8="ptq@torchscript", int8_ms=2.0, float_="onnx@openvino", float_ms=5.0, low=2.4, high=2.6),
    )
    return record.model_copy(update=changes)


def test_the_page_counts_who_passes_and_says_why_others_do_not(tmp_path: Path) -> None:
    failed = Passed(status="failed", reason="it broke", seconds=3.0)
    other = whole("vgg11", stages={**whole("vgg11").stages, "ptq": failed})
    records = [whole("resnet18"), other, whole("timm:levit_128s")]
    text = page(records, Settings(), ["resnet18", "vgg11"])
    passing = (
        "**1 of 2 torchvision classifiers pass every stage.** So do 1 of the 1 families of timm that were tried.\n"
    )
    assert passing in text
    assert "not yet" not in text
    assert "- vgg11, ptq: `it broke`" in text
    line = next(line for line in text.splitlines() if line.startswith("| resnet18 | random"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[2:10] == ["11.0", "64", "25.0%, 32 dB", "75%", "0.26", "90.0%, 18.2 dB", "98.4%, 28.5 dB", ""]
    assert cells[-2] == "2.50 [2.40, 2.60]"


def test_the_page_marks_records_of_which_less_was_rounded() -> None:
    oldest = Signal(image_share=0.25, rounding_db=31.5, top1=0.75, images=64)
    old = oldest.model_copy(update={"weights_rounded": True})
    assert "| 25.0%, 32 dB** |" in page([whole("resnet18", signal=oldest)], Settings(), ["resnet18"])
    assert "| 25.0%, 32 dB* |" in page([whole("resnet18", signal=old)], Settings(), ["resnet18"])


def test_the_page_names_deep_transformers() -> None:
    signal = whole("vit_h_14").signal
    assert signal is not None
    deep = whole("vit_h_14", signal=signal.model_copy(update={"branches": 64}))
    text = page([deep, whole("resnet18")], Settings(), ["vit_h_14", "resnet18"])
    assert "residual branches (vit_h_14 64) have small ones" in text
    assert text.count("| 25.0%, 32 dB† |") == text.count("| 25.0%, 32 dB |") == 1


def test_the_page_counts_those_that_were_not_taken_or_not_timed_yet() -> None:
    stages = whole("resnet18").stages
    untimed = whole("resnet18", speed=None, stages={name: stages[name] for name in stages if name != "speed"})
    begun = whole("resnet34", speed=None, stages={name: stages[name] for name in STAGES[:3]})
    text = page([untimed, begun], Settings(), ["resnet18", "resnet34", "vgg11", "vgg13"])
    assert (
        "**1 of 4 torchvision classifiers pass every stage.** 1 of 4 went through all stages so far."
        " None of 4 was timed."
    ) in text
    assert text.endswith("## Not yet taken\n\nvgg11, vgg13.\n")
    lines = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in text.splitlines() if line.startswith("| r")}
    assert [cell.strip() for cell in lines["resnet34"]].count("") == 8  # of the second table: nothing is made up


def test_records_read_back_as_they_were_written(tmp_path: Path) -> None:
    record = whole("resnet18", running="ptq")
    write(record, tmp_path / "resnet18.json")
    assert read(tmp_path / "resnet18.json") == record
    assert read(tmp_path / "none.json") is None
    write_all([record], tmp_path / "zoo.json")
    assert read_all(tmp_path / "zoo.json") == [record]


def test_an_offset_that_all_images_share_is_no_signal() -> None:
    logits = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
    noise = 0.1 * torch.randn(64, 5, generator=torch.Generator().manual_seed(1))
    plain, shifted = (compared("x", "float", logits + by, logits + noise + by) for by in (0.0, 1000.0))
    signal, lost = (logits - logits.mean(0)).square().sum(), noise.square().sum()
    assert plain.sqnr_db == pytest.approx(10 * math.log10(signal / lost), abs=1e-3)
    assert shifted.sqnr_db == pytest.approx(plain.sqnr_db, abs=0.01)
    assert compared("x", "float", logits, logits).sqnr_db is None


def agreed(engine: str, reference: Literal["float", "integers"], sqnr_db: float | None) -> Agreement:
    return Agreement(engine=engine, reference=reference, top1=1.0, sqnr_db=sqnr_db, images=64)


@pytest.mark.parametrize(
    ("integers", "floats", "other", "said"),
    [
        (3.0, 2.0, 40.0, "against float 2.0 dB where exact arithmetic has 18.0"),
        (None, 18.0, 40.0, None),  # equal to the last bit
        (9.0, 17.0, 11.0, None),  # ties that spread: no farther from float than exact arithmetic is, and in all engines
        (2.1, 12.1, 17.3, "against them 2.1 dB where onnxruntime has 17.3"),
        (30.0, 18.0, 60.0, None),
    ],
)
def test_an_engine_that_computes_something_else_is_named(
    integers: float | None, floats: float, other: float, said: str | None
) -> None:
    found = [
        agreed("reference program", "float", 18.0),
        agreed("onnxruntime", "integers", other),
        agreed("openvino", "integers", integers),
        agreed("onnxruntime", "float", 18.0),
        agreed("openvino", "float", floats),
    ]
    expected = said and f"openvino computes something else than these integers mean: SQNR {said}"
    assert disagreeing(found) == expected


def deep(depth: int = 24) -> nn.Sequential:
    """A plain network in which the library's own weights lose the images: no shortcuts, no norms."""
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3))


def bars(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of three kinds: bright left, bright top, bright all over, under noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    images = 0.3 * torch.randn(count, 3, 16, 16, generator=generator)
    images[labels == 0, :, :, :4] += 2
    images[labels == 1, :, :8] += 2
    images[labels == 2] += 1.5
    return images, labels


def test_drawn_weights_keep_images_apart_where_the_librarys_do_not() -> None:
    torch.manual_seed(0)
    library, drawn = deep().eval(), deep()
    images, _ = bars(32, 0)
    initialise(drawn, images)
    spreads = []
    for module in (library, drawn):
        with torch.no_grad():
            features = module[:-1](bars(64, 1)[0])
        spreads.append(float(features.var(0).sum() / features.square().mean(0).sum()))
    assert spreads[1] > 100 * spreads[0]
    signal = fit_head(drawn, lambda: iter([bars(96, 2)]), lambda: iter([bars(60, 3)]))
    assert signal.images == 60
    assert signal.top1 > 0.8
    with torch.no_grad():
        answers = drawn(bars(60, 3)[0])
    assert signal.top1 == pytest.approx(float((answers.argmax(1) == bars(60, 3)[1]).double().mean()))
    assert answers.std(0).min() > 0.1


def test_every_layer_of_a_drawn_network_has_variance_one_on_the_images() -> None:
    module, images = deep(6), bars(32, 0)[0]
    initialise(module, images)
    x = images
    with torch.no_grad():
        for layer, behind in itertools.pairwise(module):
            x = layer(x)
            if isinstance(layer, nn.Conv2d):
                assert float((x - x.mean((0, 2, 3), keepdim=True)).square().mean()) == pytest.approx(1.0, rel=1e-3)
                assert isinstance(behind, nn.ReLU)


def named(module: nn.Module, layers: list[nn.Module]) -> list[str]:
    names = {id(layer): name for name, layer in module.named_modules()}
    return [names[id(layer)] for layer in layers]


def test_residual_branches_are_found_by_what_they_are_added_to() -> None:
    """MaxViT's convolutions here change the resolution: what they are added to is no input of theirs."""
    vit = families.build("vit").train()
    blocks = [f"encoder.layers.encoder_layer_{number}" for number in range(2)]
    expected = [f"{block}.{end}" for block in blocks for end in ("self_attention", "mlp.3")]
    assert named(vit, branch_ends(vit)) == expected
    assert vit.training
    maxvit = families.build("maxvit")
    attention = [f"blocks.{block}.layers.0.layers.{kind}_attention" for block in (0, 1) for kind in ("window", "grid")]
    expected = [f"{layer}.{end}" for layer in attention for end in ("attn_layer.1.merge", "mlp_layer.3")]
    assert named(maxvit, branch_ends(maxvit)) == expected
    assert not branch_ends(families.build("resnet"))  # no layer norms


@pytest.mark.parametrize("most", [3, 4])
def test_the_branches_of_a_deep_transformer_are_small_and_centred(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four branches are more than three."""
    monkeypatch.setattr(stream, "DEEP", most)
    module = families.build("vit")
    images = nn.functional.interpolate(bars(32, 0)[0], size=32)
    initialise(module, images)
    given: dict[str, torch.Tensor] = {}
    for name, layer in module.named_modules():
        if name.endswith("self_attention"):
            layer.register_forward_hook(lambda _, read, found, name=name: given.__setitem__(name, found[0]))
        elif name.endswith("mlp.3"):
            layer.register_forward_hook(lambda _, read, found, name=name: given.__setitem__(name, found))
    with torch.no_grad():
        module(images)
    assert len(given) == 4
    deep = most == 3
    for name, found in given.items():
        centre = found.mean((0, 1))
        power = float((found - centre).square().mean())
        if name.endswith("mlp.3"):
            assert power == pytest.approx(1 / 4 if deep else 1, rel=1e-3)
            assert float(centre.abs().max()) < 1e-3 if deep else float(centre.min()) > 0.5
        elif deep:
            assert power == pytest.approx(1, rel=1e-3)
            assert float(centre.abs().max()) < 1e-3


def test_what_8_bits_cost_counts_the_sums_of_a_deep_transformer(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = families.build("vit").eval()
    images, labels = bars(32, 0)
    shown = [(nn.functional.interpolate(images, size=32), labels)]
    signals = []
    for most in (3, 4):
        monkeypatch.setattr(stream, "DEEP", most)
        signals.append(fit_head(module, lambda: iter(shown), lambda: iter(shown)))
    assert [signal.branches for signal in signals] == [4, 0]
    assert signals[0].rounding_db < signals[1].rounding_db - 0.2


def test_sums_of_two_tensors_of_one_shape_are_rounded_and_no_others() -> None:
    ones, row = torch.ones(3, 4), torch.full((4,), 0.25)
    with RoundedSums(torch.floor):
        kept = ones + 0.75, ones + row
        rounded = ones + 0.75 * ones, torch.add(ones, 0.75 * ones)
        ones += 0.5 * ones
    assert [float(each[0, 0]) for each in (*kept, *rounded, ones)] == [1.75, 1.25, 1.0, 1.0, 1.0]


def test_where_smooth_images_are_lost_kernels_are_drawn_smooth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of images that differ in brightness alone, a kernel whose weights cancel leaves what rounding makes of them."""
    layers = nn.Conv2d(3, 48, 3, bias=False), nn.Conv2d(48, 48, 3, groups=48, bias=False)
    module = nn.Sequential(
        *(layers[0], nn.BatchNorm2d(48), nn.ReLU(), layers[1], nn.BatchNorm2d(48)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 3)),
    )
    labels = torch.arange(48) % 3
    brightness = labels[:, None, None, None] - 1 + 0.1 * torch.linspace(-1, 1, 48)[:, None, None, None]
    images = brightness.expand(48, 3, 8, 8).contiguous()
    found = []
    for clear in (-math.inf, math.inf):  # sharp kernels are always good enough; never
        monkeypatch.setattr(weights, "CLEAR_DB", clear)
        initialise(module, images)
        signal = fit_head(module, lambda: iter([(images, labels)]), lambda: iter([(images, labels)]))
        kernels = torch.cat([layer.weight.sum((2, 3)).flatten() for layer in layers])
        powers = torch.cat([layer.weight.square().sum((2, 3)).flatten() for layer in layers])
        gains = (kernels.square() / powers).detach()  # 9 where all weights are equal, 0 where they cancel
        found.append((signal.rounding_db, float(gains.min())))
    (sharp, least), (smooth, most) = found
    assert least < 0.1
    assert most > 5
    assert smooth > sharp + 3


def test_norms_of_vectors_are_drawn_as_those_of_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """LeViT's norms stand behind linear layers."""
    monkeypatch.setattr(weights, "CLEAR_DB", math.inf)  # so that all ways of drawing are tried
    norm = nn.BatchNorm1d(16)
    module = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()),
        *(nn.Linear(32, 16, bias=False), norm, nn.Linear(16, 3)),
    )
    images = torch.rand(32, 3, 8, 8)
    initialise(module, images)
    with torch.no_grad():
        given = module[:5](images)
    assert norm.running_mean is not None
    torch.testing.assert_close(norm.running_mean, given.mean(0), rtol=1e-3, atol=1e-4)


class Tokens(nn.Module):
    """As VOLO ends: a head for each image, and behind it one for each place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head, self.of_places = nn.Conv2d(3, 16, 4, 4), nn.Linear(16, 2), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = self.stem(x).relu().flatten(2).transpose(1, 2)
        return self.head(places.mean(1)) + 0.5 * self.of_places(places).amax(1)


def test_the_head_that_is_fitted_is_that_of_images_where_one_of_places_is_called_behind_it() -> None:
    torch.manual_seed(0)
    labels = torch.arange(64) % 2
    images = (labels[:, None, None, None] + 0.2 * torch.randn(64, 3, 16, 16)).contiguous()
    module = Tokens().eval()
    before = module.of_places.weight.detach().clone()
    signal = fit_head(module, lambda: iter([(images, labels)]), lambda: iter([(images, labels)]))
    assert torch.equal(module.of_places.weight, before)
    assert signal.top1 > 0.9


def test_a_squeeze_keeps_what_pooled_maps_have_in_common() -> None:
    """Centred by channel, what differs between images, and its rounding, would be made as large as all of them."""
    squeeze = nn.Conv2d(8, 6, 1)
    module = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), squeeze), *(nn.Flatten(), nn.Linear(6, 3))
    ).eval()
    images, _ = bars(32, 2)
    initialise(module, images)
    with torch.no_grad():
        pooled = module[:3](images)
        given = torch.einsum("oc,nc->no", squeeze.weight[:, :, 0, 0], pooled[:, :, 0, 0])
    assert squeeze.bias is not None
    assert not squeeze.bias.any()
    assert float(given.square().mean()) == pytest.approx(1, rel=1e-3)
    assert float(given.var(0).sum() / given.square().mean(0).sum()) < 0.5


@pytest.mark.parametrize("widest", [127, 63])
def test_what_8_and_7_bits_cost_counts_weights_and_answers(widest: int) -> None:
    """By hand: a channel whose largest weight reads what is always dark, so that its others have few integers."""
    torch.manual_seed(0)
    convolution = nn.Conv2d(3, 4, 1, bias=False)
    convolution.weight.data[:, 2] = 30.0
    module = nn.Sequential(convolution, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)).eval()
    images, labels = bars(96, 2)
    images[:, 2] = 0
    weight = convolution.weight.detach().clone()
    ends = weight.flatten(1).abs().amax(1)
    zeros = torch.zeros(4, dtype=torch.int32)
    few = torch.fake_quantize_per_channel_affine(weight, ends / widest, zeros, 0, -widest, widest)
    exact = nn.functional.conv2d(images, weight)
    lossy = nn.functional.conv2d(images, few)
    grid = torch.linspace(float(lossy.min()), float(lossy.max()), 256)
    lossy = grid[(lossy.flatten()[:, None] - grid).abs().argmin(1)].view_as(lossy)
    means = exact.mean((2, 3))
    expected = (means - means.mean(0)).square().sum() / (lossy.mean((2, 3)) - means).square().sum()
    shown = [(images, labels)]
    signal = fit_head(module, lambda: iter(shown), lambda: iter(shown), widest=widest)
    assert signal.widest == widest
    assert signal.rounding_db == pytest.approx(10 * math.log10(float(expected)), abs=0.1)
    assert torch.equal(convolution.weight, weight)  # as they were


def test_the_head_leans_on_nothing_that_rounding_drowns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bright dot makes steps of 8 bits coarse; a quarter of the labels lie, and only faint noise tells which."""
    torch.manual_seed(0)
    convolution = nn.Conv2d(3, 16, 3, stride=2)
    cut = nn.Sequential(nn.Hardtanh(-3, 3), nn.Flatten(), nn.Linear(16 * 49, 3))
    module = nn.Sequential(convolution, *cut).eval()

    def dotted(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = bars(count, seed)
        images[:, :, 0, 0] = 400
        return images, torch.where(torch.arange(count) % 4 == 0, (labels + 1) % 3, labels)

    images, _ = dotted(60, 3)
    found = []
    for share in (weights._SYMMETRIC, 0):  # of rounding's noise that the head is fitted against
        monkeypatch.setattr(weights, "_SYMMETRIC", share)
        fit_head(module, lambda: iter([dotted(48, 1)]), lambda: iter([dotted(60, 2)]))
        with torch.no_grad():
            given = convolution(images)
            step = (given.max() - given.min()) / 255
            exact, lossy = cut(given), cut(((given - given.min()) / step).round() * step + given.min())
        signal = (exact - exact.mean(0)).square().sum() / (lossy - exact).square().sum()
        found.append(10 * math.log10(float(signal)))
    assert found[0] > 8
    assert found[0] > found[1] + 4


def test_a_network_whose_head_reads_no_numbers_is_refused() -> None:
    """Its weights are numbers, but grew until what they make of images is not."""
    first = nn.Conv2d(3, 4, 16)
    first.weight.data.fill_(3e38)
    module = nn.Sequential(first, nn.Flatten(), nn.Linear(4, 3)).eval()
    images, labels = torch.ones(8, 3, 16, 16), torch.arange(8) % 3
    with pytest.raises(PassError, match="what the head reads of these images is no number"):
        fit_head(module, lambda: iter([(images, labels)]), lambda: iter([(images, labels)]))
