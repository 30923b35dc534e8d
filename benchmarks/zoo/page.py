"""The zoo's records as a page."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from benchmarks.here import here
from benchmarks.zoo.record import CLEAR_DB, Agreement, ModelRecord, Passed, Signal
from benchmarks.zoo.stages import STAGES, Settings, passes
from benchmarks.zoo.stream import DEEP


def page(records: Sequence[ModelRecord], settings: Settings, wanted: Sequence[str]) -> str:
    """The Markdown of all records.

    Args:
        records: one a model, in the order of the tables.
        settings: that they were made with.
        wanted: torchvision's classifiers: those without a record are named, too.
    """
    own = [record for record in records if not record.name.startswith("timm:")]
    other = [record for record in records if record.name.startswith("timm:")]
    known = {record.name for record in own}
    missing = [name for name in wanted if name not in known]
    lines = [*_head(records, settings), *_counted(own, other, missing), *_drawn(records, settings), *_reading()]
    for title, group in (("torchvision", own), ("timm", other)):
        if group:
            lines += [f"## {title}", "", *_passes(group), "", *_figures(group), ""]
    lines += [*_reasons(records), *_missing(missing)]
    return "\n".join(lines).rstrip() + "\n"


def made_with() -> str:
    """This machine and its libraries, in words."""
    return here("torch", "torchvision", "onnxruntime-gpu", "openvino")


def _head(records: Sequence[ModelRecord], settings: Settings) -> Iterator[str]:
    days = sorted({record.made_on.isoformat() for record in records if record.made_on is not None})
    when = f" on {days[0]}" if len(days) == 1 else f" from {days[0]} to {days[-1]}" if days else ""
    yield from (
        "# The zoo",
        "",
        f"Made by `make zoo`{when}. The second table has the size of the images (`--image-size`). "
        f"{settings.calibration} images calibrate a model, and {settings.judging} judge it. Each model has a record "
        "in `benchmarks/records/zoo.json`, with its day. `make zoo` makes only what the records lack.",
        "",
        "These machines made the records:",
        "",
        *(f"- {place}" for place in sorted({record.made_with for record in records if record.made_with})),
        "",
    )


def _counted(own: Sequence[ModelRecord], other: Sequence[ModelRecord], missing: Sequence[str]) -> Iterator[str]:
    """How many pass: of all that there are, whether they were taken yet or not."""
    every = len(own) + len(missing)
    done = sum(len(record.stages) >= len(STAGES) - 1 for record in own)
    timed = sum(record.speed is not None for record in own)
    yield (
        f"**{_passing(own)} of {every} torchvision classifiers pass every stage.**"
        + (f" So do {_passing(other)} of the {len(other)} families of timm that were tried." if other else "")
        + (f" {done} of {every} went through all stages so far." if done < every else "")
        + (f" {timed or 'None'} of {every} {'was' if timed < 2 else 'were'} timed." if timed < every else "")
    )
    yield ""


def _missing(missing: Sequence[str]) -> Iterator[str]:
    if missing:
        yield from ("", "## Not yet taken", "", ", ".join(missing) + ".")


def _drawn(records: Sequence[ModelRecord], settings: Settings) -> Iterator[str]:
    if drawn := [record for record in records if record.signal and record.weights.startswith("random")]:
        share = sorted(record.signal.image_share for record in drawn if record.signal)
        top1 = sorted(record.signal.top1 for record in drawn if record.signal)
        yield (
            f"{len(drawn)} of {len(records)} models have random weights. They are drawn so that the signal lives "
            f"through the depth (`benchmarks/zoo/weights.py`). The head is fitted to the digits. Of the power of "
            f"the head's input, {share[0]:.1%} to {share[-1]:.1%} (median {statistics.median(share):.0%}) differs "
            f"between images. The head is right on {top1[0]:.0%} to {top1[-1]:.0%} of the images that it was not "
            f"fitted on. Guessing is right on 10 %. So agreement and SQNR are not those of trained networks. If images "
            f"stood out of rounding by less than {CLEAR_DB:.0f} dB, the network was trained on {settings.fitting} "
            f"images. The table names the epochs." + _deep(drawn)
        )
        yield ""


def _deep(drawn: Sequence[ModelRecord]) -> str:
    """Which transformers were drawn as deep ones."""
    deep = [f"{_name(record)} {record.signal.branches}" for record in drawn if record.signal and record.signal.branches]
    if not deep:
        return ""
    return (
        f" Transformers with more than {DEEP} residual branches ({', '.join(deep)}) have small ones. Their sums count "
        "as rounded."
    )


def _passing(records: Sequence[ModelRecord]) -> int:
    return sum(passes(record) for record in records)


def _reading() -> Iterator[str]:
    yield from (
        "How to read the tables:",
        "",
        "- **Seconds** are processor time, of all threads.",
        "- **images differ by**: a share of the power of the head's input differs between images. Beside it is how far "
        "that is above the rounding to 8 bits. Weights, answers of layers and pooled maps are rounded. A dagger means "
        "residual sums, too. One star means no pooled maps, two stars only answers. Of 7-bit weights: as in int8 for "
        "CPUs without VNNI. Of 7 bits: older records with answers of 7 bits.",
        "- **size**: the int8 graph's, as a share of the float graph's.",
        "- **of the integers**: agreement of top-1 with float, and the SQNR of the logits in dB. Only the part of the "
        "logits that differs between images counts.",
        "- **of engines**: the same for engines, against the integers in exact arithmetic. It is the lowest of torch's "
        "kernels, ONNX Runtime and OpenVINO.",
        "- **node by node**: ONNX Runtime computes the graph for TensorRT so. TensorRT did not run.",
        "- **int8**, **float**: the fastest execution of one image, batch 1.",
        "- **times as fast**: their ratio, with a 95 % interval if they took turns.",
        "",
    )


def _passes(records: Sequence[ModelRecord]) -> Iterator[str]:
    yield f"| model | {' | '.join(STAGES)} |"
    yield f"|---|{':-:|' * len(STAGES)}"
    for record in records:
        yield f"| {_name(record)} | {' | '.join(_word(record.stages.get(stage)) for stage in STAGES)} |"


def _word(stage: Passed | None) -> str:
    if stage is None:
        return "not yet"
    if stage.status != "ok":
        return f"**{stage.status}**"
    return "ok" if stage.seconds is None else f"ok, {stage.seconds:.0f} s"


def _name(record: ModelRecord) -> str:
    return record.name.removeprefix("timm:")


def _figures(records: Sequence[ModelRecord]) -> Iterator[str]:
    yield (
        "| model | weights | parameters, M | pixels a side | images differ by | top-1 | size | of the integers "
        "| of engines | TensorRT's integers | node by node | int8 | float | times as fast | memory, GiB |"
    )
    yield f"|---|---|{'---:|' * 13}"
    for record in records:
        signal, size = record.signal, _share(record)
        cells = [
            _name(record),
            record.weights.removeprefix("torchvision's weights "),
            f"{record.parameters / 1e6:.1f}" if record.parameters else "",
            str(record.image_size or ""),
            _signal(signal) if signal else "",
            f"{signal.top1:.0%}" if signal else "",
            f"{size:.2f}" if size else "",
            *_agreeing(record.stages.get("agreement")),
            *_agreeing(record.stages.get("agreement-tensorrt")),
            *_speeds(record),
            f"{record.peak_bytes / 2**30:.1f}",
        ]
        yield f"| {' | '.join(cells)} |"


def _signal(signal: Signal) -> str:
    stars = "*" * (2 - signal.weights_rounded - signal.pooled_rounded)
    bits = " of 7 bits" if signal.largest < 255 else " of 7-bit weights" if signal.widest < 127 else ""
    return f"{signal.image_share:.1%}, {signal.rounding_db:.0f} dB{bits}{stars}{'†' if signal.branches else ''}"


def _share(record: ModelRecord) -> float | None:
    sizes = [stage.bytes if (stage := record.stages.get(name)) else None for name in ("onnx-int8", "onnx")]
    return sizes[0] / sizes[1] if sizes[0] and sizes[1] else None


def _agreeing(stage: Passed | None) -> tuple[str, str]:
    """Of the reference with float, and the worst of the engines with the reference."""
    if stage is None or not stage.agreements:
        return "", ""
    of_floats = [each for each in stage.agreements if each.engine == "reference program"]
    of_integers = [each for each in stage.agreements if each.reference == "integers"]
    return _lowest(of_floats), _lowest(of_integers)


def _lowest(found: Sequence[Agreement]) -> str:
    if not found:
        return ""
    ratios = [each.sqnr_db for each in found if each.sqnr_db is not None]
    return f"{min(each.top1 for each in found):.1%}, {f'{min(ratios):.1f} dB' if ratios else 'equal'}"


def _speeds(record: ModelRecord) -> tuple[str, str, str]:
    speed = record.speed
    if speed is None:
        return "", "", ""
    interval = f" [{speed.low:.2f}, {speed.high:.2f}]" if speed.low is not None and speed.high is not None else ""
    return (
        f"{speed.int8} {speed.int8_ms:.2f} ms",
        f"{speed.float_} {speed.float_ms:.2f} ms",
        f"{speed.ratio:.2f}{interval}",
    )


def _reasons(records: Sequence[ModelRecord]) -> Iterator[str]:
    failed = [
        (record.name, name, stage.reason)
        for record in records
        for name, stage in record.stages.items()
        if stage.status == "failed"
    ]
    if failed:
        yield from ("## What failed", "")
        yield from (f"- {model}, {stage}: `{reason}`" for model, stage, reason in failed)
