"""The bench of serving: its ratios and verdicts are those of the rounds, and its subjects really answer."""

from __future__ import annotations

import argparse
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from benchmarks import serve_page as page
from benchmarks.serve import (
    LARGE,
    NOT_TUNED,
    PHOTOS,
    REDUCED,
    Agreement,
    agreement,
    document,
    enlarged,
    measure,
    measure_alone,
    reduced,
    tuning,
    ways,
)
from benchmarks.serve_subjects import Shot, Stage, Subject
from serve.load import reference_answers
from serve.load.histogram import Histogram
from serve.load.synthetic_images import make_pictures
from serve.load.workload import Item, Known, Workload
from serve.runtime.card.card import load_card
from serve.runtime.card.serving import Serving
from serve.runtime.service.stages import STAGES
from serve.torchserve.archive_builder import serving_of
from tests.serve import artifacts


def shot(throughput: float, milliseconds: float = 1.0, **fields: object) -> Shot:
    latency = Histogram()
    for _ in range(10):
        latency.add(milliseconds)
    return Shot(throughput, latency, 1.0, 0.1, **fields)  # type: ignore[arg-type]


# Two rounds of one client and of eight; the machine was half as fast in the second.
SHOTS = {
    ("own", PHOTOS, 1): [shot(150, 4), shot(75, 8)],
    ("own", PHOTOS, 8): [shot(360, 20), shot(190, 40)],
    ("pipelined", PHOTOS, 1): [shot(200, 4), shot(100, 8)],
    ("pipelined", PHOTOS, 8): [shot(400, 20), shot(200, 40)],
    ("serial", PHOTOS, 1): [shot(250, 3.5), shot(125, 7)],
    ("serial", PHOTOS, 8): [shot(250, 3.5), shot(125, 7)],
}


def test_aims_are_judged_by_the_median_of_ratios_within_a_round() -> None:
    (ratio,) = page.aims(SHOTS, ["own", "pipelined", "serial"], PHOTOS, {})
    assert ratio.values == (360 / 400, 190 / 200)
    assert ratio.value == pytest.approx(0.925)
    assert ratio.met
    assert "pass" in ratio.line


def test_tuned_is_held_against_not_tuned_where_there_are_both() -> None:
    usual = {("own-not tuned", PHOTOS, 1): [shot(140), shot(80)], ("own-not tuned", PHOTOS, 8): [shot(300), shot(200)]}
    (aim,) = page.aims({**SHOTS, **usual}, ["own", "own-not tuned"], PHOTOS, {})
    assert aim.values == (360 / 300, 190 / 200)
    assert aim.value == pytest.approx(1.075)
    assert aim.met
    assert "tuned against not tuned" in aim.line
    assert aim.line.endswith("| at least 1× | pass |")
    kept = {("own-not tuned", PHOTOS, 1): [shot(150), shot(75)], ("own-not tuned", PHOTOS, 8): [shot(400), shot(190)]}
    (aim,) = page.aims({**SHOTS, **kept}, ["own", "own-not tuned"], PHOTOS, {})
    assert not aim.met


def test_a_difference_of_p50_is_the_median_of_the_turns_and_not_of_the_medians() -> None:
    turns = {
        ("own", PHOTOS, 1): [shot(1, 2), shot(1, 10), shot(1, 5)],
        ("serial", PHOTOS, 1): [shot(1, 1), shot(1, 3), shot(1, 4)],
    }
    (aim,) = page.aims({}, [], PHOTOS, turns)
    assert aim.value == pytest.approx(1, abs=0.1), "1, 7 and 1; the medians differ by 2"
    assert not aim.met
    assert "**fail**" in aim.line


def test_what_no_server_can_pass_is_told_and_not_judged() -> None:
    shots = {**SHOTS, ("stock", PHOTOS, 1): [shot(50), shot(50)], ("stock", PHOTOS, 8): [shot(60), shot(100)]}
    turns = {("pipelined", PHOTOS, 1): [shot(1, 5)], ("serial", PHOTOS, 1): [shot(1, 4)]}
    threads, stock = page.aims(shots, ["pipelined", "stock"], PHOTOS, turns)
    assert threads.value == pytest.approx(1, abs=0.1)
    assert stock.values == (400 / 60, 200 / 100)
    for told in (threads, stock):
        assert not any(word in told.line for word in ("pass", "fail", "at least", "at most"))
        assert told.line.count("|") == 5


def test_those_compared_at_one_client_are_asked_one_right_after_the_other_each_first_in_its_turn() -> None:
    asked: list[tuple[str, str, int, float]] = []

    def subject(key: str) -> Subject:
        def ask(workload: str, clients: int, seconds: float) -> Shot:
            asked.append((key, workload, clients, seconds))
            return shot(1)

        return Subject(key, key, ask)

    subjects = [*map(subject, ("own", "stock", "serial")), Subject("torchserve", "", left_out="no Java")]
    found = measure_alone(subjects, 3, 0.5)
    assert [key for key, *_ in asked] == ["own", "serial", "serial", "own", "own", "serial"]
    assert {how[1:] for how in asked} == {(PHOTOS, 1, 0.5)}
    assert {key: len(shots) for key, shots in found.items()} == {("own", PHOTOS, 1): 3, ("serial", PHOTOS, 1): 3}
    assert measure_alone(subjects[:2], 3, 0.5) == {}, "there is nothing to compare it with"


def tuned(artifact: Path, usual: Serving) -> Path:
    """As `serve tune` leaves it, as far as this is read: what was usual before, beside what the folder says now."""
    (artifact / "tuning.json").write_text(json.dumps({"usual": {"serving": json.loads(usual.text)}}))
    return artifact


def test_ways_are_the_present_one_what_was_before_a_tuning_and_reduced_decoding(tmp_path: Path) -> None:
    artifact = artifacts.onnx(tmp_path / "artifact")
    now = serving_of(artifact, load_card(artifact))
    assert ways(artifact) == {"": now, REDUCED: replace(now, decoder="reduced")}
    assert tuning(artifact, ways(artifact)) == "`serve tune` was not run on it."
    before = replace(now, batch_size=now.batch_size + 1)
    found = ways(tuned(artifact, before))
    assert found == {"": now, NOT_TUNED: before, REDUCED: replace(now, decoder="reduced")}
    assert "a row of its own" in tuning(artifact, found)
    (artifact / "serving.json").write_text(replace(now, decoder="reduced").text)
    assert REDUCED not in ways(artifact)


def test_a_tuning_that_kept_the_usual_way_is_told_instead_of_a_row_left_out_in_silence(tmp_path: Path) -> None:
    artifact = artifacts.onnx(tmp_path / "artifact")
    now = serving_of(artifact, load_card(artifact))
    used = ways(tuned(artifact, now))
    assert NOT_TUNED not in used
    options = argparse.Namespace(artifact="a", run="r", rounds=2, seconds=1.0, turns=2, photos=None)
    told = tuning(artifact, used)
    text = "\n".join(document(options, [], SHOTS, used, "today", tuned=told, agreed=None, alone=SHOTS))
    assert "has kept what was usual, so there is no row “not tuned”" in text
    assert "A difference of p50 is the median of 2 differences" in text
    assert "| own server, p50 at one client above in process |" in text
    assert "Decoder `reduced`" not in text


def test_reduced_decoding_is_asked_with_the_large_pictures_alone_and_its_agreement_told() -> None:
    asked: list[tuple[str, str]] = []

    def subject(key: str, *sent: str) -> Subject:
        def ask(workload: str, clients: int, seconds: float) -> Shot:
            asked.append((key, workload))
            return shot(10)

        return Subject(key, key.upper(), ask, sent=frozenset(sent))

    subjects = [subject("own", PHOTOS, LARGE), subject(f"own-{REDUCED}", LARGE), subject("echo-uvicorn", PHOTOS, LARGE)]
    shots = measure(subjects, [PHOTOS, LARGE], 2, 1.0)
    assert set(asked) == {("own", PHOTOS), ("own", LARGE), (f"own-{REDUCED}", LARGE), ("echo-uvicorn", PHOTOS)}
    options = argparse.Namespace(artifact="a", run="r", rounds=2, seconds=1.0, photos=None)
    agreed = Agreement(images=8, equal=7, difference=0.125)
    text = "\n".join(document(options, subjects, shots, {}, "today", tuned="", agreed=agreed, alone={}))
    rows = [line.split(" | ")[0] for line in text.partition("## Large ones")[2].splitlines() if line.startswith("| O")]
    assert rows == ["| OWN", "| OWN-DECODER REDUCED"]
    assert "7 of 8 answers (87.5%) have the top-1 class of whole decoding" in text
    assert "differs by 0.125 at most" in text


def test_agreement_counts_equal_best_classes() -> None:
    def items(*answers: tuple[float, ...]) -> list[Item]:
        tables = [[{"index": index, "probability": value} for index, value in enumerate(answer)] for answer in answers]
        best = [sorted(table, key=lambda entry: -entry["probability"]) for table in tables]
        return [Item("x", b"", known=(Known(answer) if answer else Known(status=413),)) for answer in best]

    one = items((0.6, 0.3, 0.1), (0.2, 0.5, 0.3), (0.2, 0.5, 0.3), ())
    other = items((0.5, 0.4, 0.1), (0.2, 0.39, 0.41), (0.2, 0.5, 0.3), (1.0, 0.0, 0.0))
    found = agreement(one, other)
    assert (found.images, found.equal) == (3, 2)
    assert found.difference == pytest.approx(0.11)


@pytest.mark.slow
def test_reduced_decoding_is_known_by_its_own_answers(tmp_path: Path) -> None:
    artifact = artifacts.onnx(tmp_path / "artifact")
    used = ways(artifact)
    predictor = reference_answers.opened(artifact, used[""])
    pictures = {PHOTOS: make_pictures(2), LARGE: make_pictures(1, ((1600, 1200),))}
    sent = {
        name: Workload(reference_answers.items(predictor, images), "classification")
        for name, images in pictures.items()
    }
    workload, agreed = reduced(artifact, used, sent, 1)
    (item,), (whole,) = workload.items, sent[LARGE].items
    assert item.body == whole.body
    assert item.known != whole.known, "the pixels are others"
    assert (agreed.images, agreed.equal) == (2, 2)
    assert 0 < agreed.difference < 0.05
    with Image.open(io.BytesIO(enlarged(sent[PHOTOS].items[0].body))) as opened:
        assert opened.width * opened.height == pytest.approx(12e6, rel=1e-3)
        assert opened.width / opened.height == pytest.approx(500 / 375, rel=1e-3)


def test_aims_without_what_they_are_judged_by_are_not_told() -> None:
    only = {key: found for key, found in SHOTS.items() if key[0] == "own"}
    assert page.aims(only, ["own"], PHOTOS, only) == []


def test_tables_have_a_line_for_each_subject_that_was_measured_and_the_plot_is_drawn(tmp_path: Path) -> None:
    def never(workload: str, clients: int, seconds: float) -> Shot:
        raise AssertionError

    subjects = [Subject(key, key.upper(), never) for key in ("own", "pipelined", "serial")]
    lines = page.speed_table(SHOTS, [*subjects, Subject("stock", "STOCK", left_out="no captum")], PHOTOS, (1, 8))
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| OWN", "| PIPELINED", "| SERIAL"]
    assert "| 112/s | 275/s | 6.00 ms" in lines[2].replace("5.99", "6.00").replace("6.01", "6.00")
    page.plot(SHOTS, subjects, PHOTOS, tmp_path / "plot.svg")
    assert "<svg" in (tmp_path / "plot.svg").read_text()


def test_the_rest_of_a_request_is_what_the_stages_do_not_tell() -> None:
    stages = {"queue": 0.0, "decode": 3.0, "preprocess": 0.0, "infer": 4.5, "postprocess": 0.0}
    told = {
        ("own", PHOTOS, 1): [shot(1, 10, stages=stages)],
        ("torchserve", PHOTOS, 1): [shot(1, 10, stages={"frontend": 2.0, **stages})],
    }
    head, _, own, torchserve = page.stage_table(told, [Subject("own", "OWN"), Subject("torchserve", "TS")], PHOTOS, 1)
    names = ["frontend", "queue", "decode", "preprocess", "infer", "postprocess", "the rest", "mean"]
    assert [cell.strip() for cell in head.split("|")[2:-1]] == names
    assert own.split("|")[2].strip() == "–"
    assert [float(cell) for cell in own.split("|")[3:-1]] == pytest.approx([0, 3, 0, 4.5, 0, 2.5, 10], abs=0.06)
    cells = [float(cell) for cell in torchserve.split("|")[2:-1]]
    assert cells == pytest.approx([2, 0, 3, 0, 4.5, 0, 0.5, 10], abs=0.06)


@pytest.mark.slow
def test_subjects_answer_and_are_stopped(tmp_path: Path) -> None:
    artifact = artifacts.onnx(tmp_path / "artifact")
    serving = serving_of(artifact, load_card(artifact))
    items = reference_answers.items(reference_answers.opened(artifact, serving), make_pictures(4))
    with Stage(tmp_path, artifact, {"": serving}, {PHOTOS: Workload(items, "classification")}) as stage:
        subjects = stage.start(tmp_path, 5, ("echo-uvicorn", "own", "serial", "pipelined"))
        found = {
            subject.key: subject.ask(PHOTOS, clients, 1.0)
            for subject in subjects
            if subject.ask is not None
            for clients in (2,)
        }
    assert list(found) == ["echo-uvicorn", "own", "serial", "pipelined"]
    assert all(one.bad == 0 and one.throughput > 0 and one.server_ms > 0 for one in found.values())
    assert set(found["pipelined"].stages) == set(STAGES)
    assert set(found["own"].stages) >= set(STAGES)
