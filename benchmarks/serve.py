"""What serving costs: our own server, our archive behind TorchServe, the stock handler, echoes, and no server at all.

All are started, and measured in turns, in rounds, on the same cores as the load generator, whose CPU time is told.
Every answer is compared with the image's known one. Needs the extra ``peers`` and a run of ResNet-18 at 224 pixels
(``make optimize MODEL=resnet18 IMAGE_SIZE=224 RUN=resnet18-224``; one epoch does, as a network is no faster for having
learned): ``make bench-serve``. It takes about 20 minutes, with ``--short`` three; ratios mean something only on a
machine that does nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import math
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image

from benchmarks import serve_page as page
from benchmarks.commands import command
from benchmarks.here import begun, here
from benchmarks.serve_subjects import Shot, Stage, Subject
from serve.common import layout
from serve.load import reference_answers
from serve.load.synthetic_images import make_picture, make_pictures, read_pictures
from serve.load.workload import Item, Workload
from serve.runs import stored_runs
from serve.runtime.card.card import load_card
from serve.runtime.card.serving import Serving, parse_serving
from serve.runtime.decoders.base import CPU
from serve.runtime.errors import PipelineError, UserError
from serve.torchserve.archive_builder import serving_of
from serve.tune.servers import ended_in_order
from serve.tune.space import describe
from serve.tune.tuning import TUNING_FILE

PHOTOS, LARGE = "photos", "12 megapixels"
#: Saturation is the best of all; the last shows whether the one before it was enough.
CLIENTS = {PHOTOS: (1, 8, 16, 32), LARGE: (1, 8)}
_LARGE_SIZE = (4000, 3000)
ALONE_S = 1.0
NOT_TUNED, REDUCED = "not tuned", "decoder reduced"


def ways(artifact: Path) -> dict[str, Serving]:
    """How the artifact is served: as its folder says; where that was tuned, also as it was before; at reduced scale."""
    found = {"": serving_of(artifact, load_card(artifact))}
    if (artifact / TUNING_FILE).exists():
        usual = json.loads((artifact / TUNING_FILE).read_text(encoding="utf-8"))["usual"]["serving"]
        before = parse_serving(json.dumps(usual), artifact / TUNING_FILE)
        if before != found[""]:
            found[NOT_TUNED] = before
    if found[""].decoder == CPU:
        found[REDUCED] = dataclasses.replace(found[""], decoder="reduced")
    return found


def tuning(artifact: Path, used: Mapping[str, Serving]) -> str:
    """What `serve tune` has made of the artifact, in a sentence."""
    if not (artifact / TUNING_FILE).exists():
        return "`serve tune` was not run on it."
    if NOT_TUNED in used:
        return "`serve tune` has chosen that. How it was served before has a row of its own."
    return "`serve tune` has kept what was usual, so there is no row “not tuned”. It would be the same."


def workloads(artifact: Path, serving: Serving, photos: Path | None, large: int) -> dict[str, Workload]:
    """What is sent, with the artifact's known answers."""
    pictures = {
        PHOTOS: make_pictures(40) if photos is None else read_pictures(photos),
        LARGE: [(f"large-{seed}", make_picture(seed, _LARGE_SIZE)) for seed in range(large)],
    }
    predictor = reference_answers.opened(artifact, serving)
    return {
        name: reference_answers.workload(predictor, reference_answers.items(predictor, images), serving)
        for name, images in pictures.items()
        if images
    }


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How the answers of another decoder agree with those of whole decoding.

    Attributes:
        images: how many were asked about.
        equal: those whose best class is the same.
        difference: the largest difference of a class's probability.
    """

    images: int
    equal: int
    difference: float


def agreement(one: Sequence[Item], other: Sequence[Item]) -> Agreement:
    """Compare the known answers to the same images; refusals have none."""
    pairs = [(mine.known[0].answer, theirs.known[0].answer) for mine, theirs in zip(one, other, strict=True)]
    answered = [(mine, theirs) for mine, theirs in pairs if mine and theirs]
    tables = [
        [{entry["index"]: entry["probability"] for entry in answer} for answer in answers] for answers in answered
    ]
    return Agreement(
        len(answered),
        sum(mine[0]["index"] == theirs[0]["index"] for mine, theirs in answered),
        max((abs(mine[index] - theirs[index]) for mine, theirs in tables for index in mine), default=0.0),
    )


def enlarged(picture: bytes) -> bytes:
    """A picture at the large ones' number of pixels, as JPEG."""
    with Image.open(io.BytesIO(picture)) as opened:
        scale = math.sqrt(math.prod(_LARGE_SIZE) / math.prod(opened.size))
        size = (round(opened.width * scale), round(opened.height * scale))
        stream = io.BytesIO()
        opened.convert("RGB").resize(size, Image.Resampling.BICUBIC).save(stream, "JPEG", quality=90)
    return stream.getvalue()


def reduced(
    artifact: Path, used: Mapping[str, Serving], sent: Mapping[str, Workload], most: int | None
) -> tuple[Workload, Agreement]:
    """What decoding at reduced scale answers to the large pictures, and how that agrees with whole decoding.

    It is compared on these and on the other pictures, or ``most`` of them, enlarged to their size.
    """
    whole, scaled = (reference_answers.opened(artifact, used[way]) for way in ("", REDUCED))
    large = [(item.name, item.body) for item in sent[LARGE].items]
    others = [(item.name, enlarged(item.body)) for item in sent[PHOTOS].items[:most]]
    mine = reference_answers.items(scaled, large)
    agreed = agreement(
        [*sent[LARGE].items, *reference_answers.items(whole, others)], [*mine, *reference_answers.items(scaled, others)]
    )
    return dataclasses.replace(sent[LARGE], items=mine), agreed


def measure(
    subjects: Sequence[Subject], sent: Sequence[str], rounds: int, seconds: float
) -> dict[tuple[str, str, int], list[Shot]]:
    """Ask all subjects in turns, each round beginning with another of them."""
    shots: dict[tuple[str, str, int], list[Shot]] = defaultdict(list)
    here = [subject for subject in subjects if subject.ask is not None]
    began = time.monotonic()
    for number in range(rounds):
        turn = number % len(here)
        for subject in [*here[turn:], *here[:turn]]:
            assert subject.ask is not None
            for workload in sent:
                if workload not in subject.sent or (workload == LARGE and subject.key.startswith("echo")):
                    continue
                for clients in CLIENTS[workload]:
                    shot = subject.ask(workload, clients, seconds)
                    shots[subject.key, workload, clients].append(shot)
        spent = time.monotonic() - began
        print(f"round {number + 1} of {rounds}: {spent / (number + 1) * (rounds - number - 1):.0f} s left", flush=True)
    return dict(shots)


def measure_alone(subjects: Sequence[Subject], turns: int, seconds: float) -> dict[tuple[str, str, int], list[Shot]]:
    """Ask those whose p50 at one client is compared, one right after the other: tenths of a ms are told apart so.

    Within a round half a minute lies between two subjects, in which a machine that others use has changed by more.
    """
    shots: dict[tuple[str, str, int], list[Shot]] = defaultdict(list)
    here = [subject for subject in subjects if subject.ask is not None and subject.key in page.COMPARED_ALONE]
    for number in range(turns if len(here) > 1 else 0):
        turn = number % len(here)
        for subject in [*here[turn:], *here[:turn]]:
            assert subject.ask is not None
            shots[subject.key, PHOTOS, 1].append(subject.ask(PHOTOS, 1, seconds))
    return dict(shots)


def document(
    options: argparse.Namespace,
    subjects: Sequence[Subject],
    shots: page.Shots,
    used: dict[str, Serving],
    began: str,
    *,
    tuned: str,
    agreed: Agreement | None,
    alone: page.Shots,
) -> list[str]:
    """The page."""
    sent = list(dict.fromkeys(workload for _, workload, _ in shots))
    measured = list(dict.fromkeys(key for key, _, _ in shots))
    photos = "pictures that the bench made" if options.photos is None else "photographs"
    made = command("benchmarks.serve", sys.argv[1:], told=("--only",))
    body = [
        "# What serving costs",
        "",
        f"Made by `{made}` on {began}: {here('torch', 'onnxruntime-gpu', 'openvino')}.",
        "",
        f"The artifact is {options.artifact} of {options.run}. A request is an image as JPEG. The answer is its best 5 "
        "classes as JSON. The artifact is served as "
        + ". It is also served as ".join(f"{_way(way)}{f' ({name})' if name else ''}" for name, way in used.items())
        + f". {tuned} All subjects ran all the time and got requests in turns. There were {options.rounds} round(s) of "
        f"{options.seconds:g} s for each number of clients (closed loop). A figure is the median of the rounds. A "
        "ratio is the median of the ratios within a round. A p99 is that of all rounds together. "
        f"{_alone(options, alone)}The load generator ran on the same cores. CPU time is that of one answer, at the "
        "largest number of clients.",
        "",
        *page.faults([*shots.values(), *alone.values()]),
        "",
        "![answers a second, and p50](serve.svg)",
        "",
    ]
    left = [f"- {subject.title}: {subject.left_out}" for subject in subjects if subject.left_out]
    if left:
        body += ["Left out:", "", *left, ""]
    body += ["## The aims", "", "| | measured | wanted | |", "|---|---:|---:|---|"]
    body += [aim.line for aim in page.aims(shots, measured, PHOTOS, alone)] + [""]
    for workload in sent:
        title = photos.capitalize() if workload == PHOTOS else "Large ones: 12 megapixels, made by the bench"
        body += [f"## {title}", "", *page.speed_table(shots, subjects, workload, CLIENTS[workload]), ""]
        tables = [page.stage_table(shots, subjects, workload, count) for count in (1, CLIENTS[workload][-1])]
        if any(tables):
            body += ["Where each millisecond goes, as the runtime reports it (means):", ""]
            body += [line for table in tables if table for line in (*table, "")]
        if workload == LARGE and agreed is not None:
            body += [
                "Decoder `reduced` decodes a JPEG of at least four times the needed size at a smaller scale. With it "
                f"{agreed.equal} of {agreed.images} answers ({agreed.equal / agreed.images:.1%}) have the top-1 class "
                f"of whole decoding. A class's probability differs by {agreed.difference:.3f} at most. These are the "
                "pictures of this table, and the others enlarged to their size. They are smoother than what a camera "
                "takes, which flatters the decoder.",
                "",
            ]
    return body


def _way(way: Serving) -> str:
    """A way to serve in words, of both servers where several workers have other threads at each."""
    own, torchserve = describe(way), describe(way, "torchserve")
    return own if own == torchserve else f"{own} (TorchServe: {torchserve})"


def _alone(options: argparse.Namespace, alone: page.Shots) -> str:
    if not alone:
        return ""
    return (
        f"A difference of p50 is the median of {options.turns} differences. For these, one client sent requests to one "
        f"subject right after the other, for {ALONE_S:g} s each. "
    )


def main() -> int:
    """Start, measure, write the page and its plot; the exit code is 1 where an answer was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", default="resnet18-224", help="of the store")
    parser.add_argument("--artifact", default=None, help="by default the recommended one")
    parser.add_argument("--store", type=Path, default=Path("model_store"))
    parser.add_argument("--photos", type=Path, default=None, help="a folder of photographs; by default they are made")
    parser.add_argument("--large", type=int, default=3, help="how many images of 12 megapixels")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of one measurement")
    parser.add_argument("--turns", type=int, default=20, help="of what is compared at one client")
    parser.add_argument("--only", nargs="+", default=(), help="keys of the subjects, such as own pipelined serial")
    parser.add_argument("--short", action="store_true", help="one round of a second each, to see that it works")
    parser.add_argument("--write", type=Path, default=None, help="the Markdown file to write, its plot beside it")
    options = parser.parse_args()
    if options.short:
        options.rounds, options.seconds, options.large, options.turns = 1, 1.0, min(options.large, 1), 2
    began = begun()
    try:
        options.artifact = options.artifact or stored_runs.recommended(options.store, options.run)
        artifact = layout.artifact_folder(options.store, options.run, options.artifact)
        card = load_card(artifact)
        if card.preprocessing.crop != (224, 224):
            raise UserError(f"{options.run} takes {card.preprocessing.crop} pixels; the bench is of 224x224")
        used = ways(artifact)
        sent = workloads(artifact, used[""], options.photos, options.large)
        others, agreed = {}, None
        if LARGE not in sent:
            used.pop(REDUCED, None)
        elif REDUCED in used:
            workload, agreed = reduced(artifact, used, sent, 4 if options.short else None)
            others[REDUCED] = {LARGE: workload}
        with (
            tempfile.TemporaryDirectory(prefix="bench-serve-") as folder,
            Stage(Path(folder), artifact, used, sent, others) as stage,
        ):
            subjects = stage.start(options.store / options.run, len(card.classes), tuple(options.only))
            shots = measure(subjects, list(sent), options.rounds, options.seconds)
            print(f"one client, in {options.turns} turns …", flush=True)
            alone = measure_alone(subjects, options.turns, ALONE_S)
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    lines = document(options, subjects, shots, used, began, tuned=tuning(artifact, used), agreed=agreed, alone=alone)
    body = "\n".join(lines)
    print(body)
    if options.write is not None:
        page.plot(shots, subjects, PHOTOS, options.write.with_suffix(".svg"))
        options.write.write_text(body + "\n", encoding="utf-8")
    return 1 if any(shot.bad for found in (*shots.values(), *alone.values()) for shot in found) else 0


if __name__ == "__main__":
    with ended_in_order():
        sys.exit(main())
