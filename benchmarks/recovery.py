"""One scale a tensor in int8, and what recovers it: ``examples/recovery.yaml`` on two MobileNetV2, as a page.

One is as it was trained; the other is the same, trained on until its channels differ as those of ImageNet's do
(`benchmarks.pulled`). ``python -m benchmarks.recovery --data imagefolder:DIR --write docs/design/recovery.md``. What
was made before comes from the store, so that it can be stopped and goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.below import add_option, tell
from benchmarks.pulled import PullExpansions
from optimize import noise
from optimize.listener import SILENT
from optimize.measure.rows import Report, Row
from optimize.passes.base import pass_of
from optimize.report.number_format import percent, points
from optimize.run.job import Job
from optimize.run.opened_job import open_job
from optimize.run.pipeline import run
from optimize.run.recipe import load_recipe
from optimize.store.artifact import WEIGHTS_FILE

RECIPE = Path("examples/recovery.yaml")
MODEL = "examples/cifar_mobilenet.py:mobilenet_v2"

#: What makes the other network.
PULL = PullExpansions(
    epochs=2,
    max_steps=500,
    batch_size=128,
    learning_rate=0.05,
    warm_up=0.0,
    weight_decay=1e-4,
    augment="shift+flip",
    channels_last=True,
    strength=0.02,
)

#: What the stages of the recipe are, in the order of the table.
TITLES = {
    "baseline": "float",
    "equalize": "float, equalized",
    "tensor": "one scale a tensor",
    "tensor-corrected": "… and biases corrected",
    "equalized": "… equalized",
    "equalized-corrected": "… equalized, biases corrected",
    "equalized-adaround": "… equalized, AdaRound, biases corrected",
    "channel": "a scale for each channel",
    "channel-auto": "… `observer: auto`, biases corrected",
    "qat": "a scale for each channel, QAT",
}


def page(report: Report, title: str, origin: str) -> str:
    """The table of a run of the recipe, the facts that it depends on, and what each layer's figures were.

    Args:
        report: of the run.
        title: of the section.
        origin: where the float network's weights are from, in words.
    """
    rows = {row.name: row for row in report.rows}
    facts = _facts(report, origin)
    return "\n".join([f"### {title}", "", *facts, "", *_table(rows), "", *_notes(rows), "", *_layers(rows)])


def _facts(report: Report, origin: str) -> Iterator[str]:
    measured = report.rows[0].measured
    assert measured is not None
    machine = f"{report.machine.cpu}, {report.machine.cores} cores" if report.machine else "unknown"
    versions = ", ".join(f"{name} {report.versions[name]}" for name in ("torch", "torchvision"))
    yield (
        f"Made by `python -m benchmarks.recovery` on {report.created:%Y-%m-%d}: {report.model} on {report.data.name}, "
        f"{report.data.train:,} training images, {origin}. {machine}, "
        f"{versions}. Top-1 on {measured.accuracy.images:,} images. Differences are paired, with 95 % intervals."
    )


def _trained(report: Report) -> str:
    config = report.rows[0].config
    if "epochs" in config:
        return f"trained by the recipe for {config['epochs']} epochs"
    return f"weights of the checkpoint {config['checkpoint'][:12]}…"


def _table(rows: dict[str, Row]) -> Iterator[str]:
    yield "| int8 weights | top-1 | difference to float | SQNR of the logits to its parent's |"
    yield "|---|---:|---:|---:|"
    for name, title in TITLES.items():
        row = rows[name]
        if row.measured is None:
            yield f"| {title} | not made: {row.skip} | | |"
            continue
        accuracy, parity = row.measured.accuracy, row.measured.parity
        difference = accuracy.difference
        change = (
            f"{points(difference.delta)} [{points(difference.low)}, {points(difference.high)}]" if difference else ""
        )
        ratio = f"{parity.sqnr_db:.1f} dB" if parity and parity.sqnr_db is not None else ""
        yield f"| {title} | {percent(accuracy.score)} | {change} | {ratio} |"


def _notes(rows: dict[str, Row]) -> Iterator[str]:
    yield "What the passes said:"
    yield ""
    for name in TITLES:
        yield from (f"- {name}: {note}" for note in rows[name].notes if _tells(note))


def _tells(note: str) -> bool:
    return any(word in note for word in ("equalized", "observer auto", "ReLU6", "best of", "no better"))


def _layers(rows: dict[str, Row]) -> Iterator[str]:
    """The five layers whose weights' channels differ most, and what bias correction did where it did most."""
    for name, title in (
        ("equalize", "The layers whose channels differed most, before and after equalization"),
        ("tensor-corrected", "The layers whose mean was off most, before and after bias correction"),
    ):
        figures: dict[str, list[tuple[str, float, float]]] = {}
        for effect in rows[name].effects:
            figures.setdefault(effect.figure, []).append((effect.layer, effect.before, effect.after))
        for figure, entries in list(figures.items())[:1]:
            yield f"{title} ({figure}):"
            yield ""
            yield "| layer | before | after |"
            yield "|---|---:|---:|"
            for layer, before, after in sorted(entries, key=lambda entry: -entry[1])[:5]:
                yield f"| {layer} | {before:.3g} | {after:.3g} |"
            yield ""


def pulled(job: Job) -> Path:
    """The weights of a job's baseline, trained on by `PULL`."""
    opened = open_job(job, SILENT)
    with contextlib.closing(opened.session) as session:
        baseline = session.baseline(load_recipe(RECIPE).baseline, opened.checkpoint, opened.origin)
        return session.apply(baseline.artifact, PULL).artifact.folder / WEIGHTS_FILE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the recipe on both networks, and write the page below the mark of the file, or print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="CIFAR-10 as a data set, such as imagefolder:DIR")
    parser.add_argument("--checkpoint", type=Path, help="weights of the float network; by default the recipe trains it")
    parser.add_argument("--store", type=Path, default=Path("model_store"))
    add_option(parser)
    options = parser.parse_args(arguments)
    noise.silence()
    asked = Job(
        model=MODEL,
        checkpoint=options.checkpoint,
        data=options.data,
        recipe=RECIPE,
        store=options.store,
        device="cpu",
        measure="cpu",
    )
    trained = run(asked, SILENT).report
    again = run(asked.model_copy(update={"checkpoint": pulled(asked), "run": "recovery-pulled"}), SILENT).report
    on = f"the weights above trained on by `{pass_of(PULL).name}` ({PULL.max_steps} steps, strength {PULL.strength:g})"
    sections = page(trained, "As it was trained", _trained(trained)), page(again, "Its channels pulled apart", on)
    tell("\n".join(sections), options.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
