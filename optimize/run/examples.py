"""Chooses images by a rule, draws two artifacts' answers to them, and keeps the pictures in the store."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from optimize.context import Context
from optimize.data.pixels import load_row
from optimize.measure.stored_examples import ExampleGroup, Examples, ShownExample, ShownPanel, write_examples
from optimize.report.number_format import percent, plural, points
from optimize.store.keys import ExamplesKey
from optimize.store.objects import Store
from optimize.store.sources import code_of
from optimize.tasks.base import Evidence, Panel, rows_of
from serve.runtime.errors import ImageError

#: The most images that a rule chooses.
CHOSEN: Final = 6

_PNG: Final = b"\x89PNG"


class Answered(NamedTuple):
    """A measured pair: its id, the evidence of its answers, and the store's key of these."""

    id: str
    evidence: Evidence
    key: str


class _Choice(NamedTuple):
    """A rule, and the places of its images in the evidence."""

    title: str
    rule: str
    places: list[int]


def keep_examples(reference: Answered, other: Answered, context: Context, rows: Sequence[int], store: Store) -> str:
    """Draw the answers of two pairs to a few images, and return the key of the stored pictures.

    Args:
        reference: the pair that the other is compared with.
        other: the other pair.
        context: data, task and preprocessing. The task must draw; see `optimize.tasks.base.Task.drawn`.
        rows: the rows of the validation split that the evidence is of.
        store: keeps the pictures.
    """
    choices = _choices(reference, other, context)
    captions = [[_caption(place, reference, other, context, rows) for place in each.places] for each in choices]

    def draw(folder: Path) -> None:
        legend: dict[str, tuple[str, int]] = {}
        groups = []
        for choice, said in zip(choices, captions, strict=True):
            shown = [
                ShownExample(caption=caption, panels=panels)
                for place, caption in zip(choice.places, said, strict=True)
                if (panels := _panels(place, int(rows[place]), (reference, other), context, legend))
            ]
            groups.append(ExampleGroup(title=choice.title, rule=choice.rule, examples=tuple(shown)))
        colours = sorted(legend.items(), key=lambda entry: -entry[1][1])
        write_examples(
            Examples(
                about=context.task.drawn,
                groups=tuple(groups),
                legend=tuple((label, colour) for label, (colour, _) in colours),
            ),
            folder,
        )

    key = ExamplesKey(
        answers=(reference.key, other.key),
        names=(reference.id, other.id),
        captions=tuple(caption for each in captions for caption in each),
        images=context.data.val.fingerprint,
        classes=context.data.classes,
        preprocessing=context.preprocessing,
        libraries={"pillow": metadata.version("pillow")},
        code=code_of(keep_examples, type(context.task)),
    ).digest
    store.obtain(key, draw, about=f"{other.id} on {context.data.name}: examples")
    return key


def _choices(reference: Answered, other: Answered, context: Context) -> list[_Choice]:
    ease, now = (np.asarray(context.task.ease(each.evidence), np.float64) for each in (reference, other))
    order = np.argsort(ease, kind="stable")
    count = min(CHOSEN, len(order))
    spread = [int(order[(2 * place + 1) * len(order) // (2 * count)]) for place in range(count)]
    loss = ease - now
    worst = [int(place) for place in np.argsort(-loss, kind="stable")[:CHOSEN] if loss[place] > 0]
    lost, answered = int(np.sum(loss > 0)), context.task.answered
    largest = f" These are the {CHOSEN} largest losses." if lost > CHOSEN else ""
    return [
        _Choice(
            "From hard to easy",
            f"All {plural(len(order), 'image')} in the order of the share of their {answered} that {reference.id} has "
            f"right, divided into {count} equal parts: the middle image of each part.",
            spread,
        ),
        _Choice(
            "The largest losses",
            f"{other.id} has fewer {answered} right than {reference.id} on {lost:,} of "
            f"{plural(len(order), 'image')}.{largest}",
            worst,
        ),
    ]


def _caption(place: int, reference: Answered, other: Answered, context: Context, rows: Sequence[int]) -> str:
    row = int(rows[place])
    source = context.data.val.sources[row]
    name = f" ({source.name})" if isinstance(source, Path) else ""
    before, now = (
        float(context.task.ease(rows_of(each.evidence, np.array([place])))[0]) for each in (reference, other)
    )
    return (
        f"Image {row + 1:,} of {len(context.data.val):,}{name}: {percent(before)} % of its {context.task.answered} "
        f"right, now {percent(now)} % ({points(now - before)})"
    )


def _panels(
    place: int, row: int, pairs: Sequence[Answered], context: Context, legend: dict[str, tuple[str, int]]
) -> tuple[ShownPanel, ...]:
    """Draw one image, and add what it shows to the legend. Nothing, if the image cannot be read any more."""
    try:
        image, target = load_row(context.data.val, row, context.preprocessing)
    except ImageError:
        return ()
    answers = {pair.id: rows_of(pair.evidence, np.array([place])) for pair in pairs}
    drawn = context.task.example(image.numpy(), target.numpy(), answers, context.data.classes)
    for label, (colour, size) in drawn.legend.items():
        legend[label] = colour, size + (legend[label][1] if label in legend else 0)
    return tuple(ShownPanel(title=panel.title, said=panel.said, source=_data_url(panel)) for panel in drawn.panels)


def _data_url(panel: Panel) -> str:
    kind = "png" if panel.image.startswith(_PNG) else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(panel.image).decode()}"
