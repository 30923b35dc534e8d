"""The sentences of a report: its verdict, how its numbers were measured, and on which machine and data."""

from __future__ import annotations

from optimize.measure.figures import Accuracy, Measured
from optimize.measure.rows import Data, Measurement, Pair, Report, Results, Row
from optimize.report.number_format import (
    NONE,
    count,
    figure,
    moment,
    number,
    percent,
    plain,
    plural,
    points,
    seconds,
    size,
    times,
)
from optimize.report.table_rows import lines
from optimize.statistics import ENOUGH
from optimize.store.layer_effects import WHOLE
from optimize.tasks.base import find_task
from serve.runtime.card.card import LETTERBOX

Fact = tuple[str, str]


def verdict(results: Results) -> str:
    """Return the result in one sentence."""
    chosen, pair, start = results.chosen, results.chosen_pair, results.baseline
    if chosen is None or pair is None or pair.measured is None:
        return "No artifact is recommended."
    found = [*_why_the_baseline(results), _speed(results, pair, pair.measured), *_smaller(chosen, start)]
    found.append(_as_accurate(pair.measured.accuracy, find_task(results.task).metric.title))
    return f"{pair.id} is recommended: {'; '.join(found)}."


def _why_the_baseline(results: Results) -> list[str]:
    if results.chosen is not results.baseline:
        return []
    if results.recommendation.unproven is not None:
        return ["of no other artifact do the images show that it is accurate enough"]
    return ["no other artifact is better by the rule below"]


def _speed(results: Results, pair: Pair, measured: Measured) -> str:
    p50 = number(measured.latency_ms.p50)
    eager = f"{times(measured.vs_eager.value)} {_eager(results)}"
    kind = "fastest float execution" if results.float_yardstick else "baseline"
    if pair.id == results.yardstick or (against := results.timed(results.yardstick)) is None:
        return f"it is the {kind} ({p50} ms at p50), {eager}"
    before = f"{results.yardstick}; {p50} instead of {number(against.latency_ms.p50)} ms at p50"
    slower = "slower: " if measured.speedup.slower else ""
    return f"{slower}{times(measured.speedup.value)} the speed of the {kind} ({before}), {eager}"


def _eager(results: Results) -> str:
    """Say what ``vs_eager`` is relative to."""
    named = [reference for reference in results.references if reference.name == results.eager]
    return "eager PyTorch" if named else f"the baseline ({results.eager})"


def _smaller(chosen: Row, start: Row) -> list[str]:
    if chosen is start or chosen.file is None or start.file is None:
        return []
    return [f"{size(chosen.file.bytes)} instead of {size(start.file.bytes)}"]


def _as_accurate(accuracy: Accuracy, metric: str) -> str:
    d = accuracy.difference
    if d is None:
        return f"{metric} {percent(accuracy.score)} %"
    interval = f"95 % interval {points(d.low)} to {points(d.high)}"
    return f"{metric} {percent(accuracy.score)} % ({points(d.delta)} points, {interval})"


def yardsticks(results: Results) -> str:
    """Say what speed is relative to, and what “eager” is."""
    if results.yardstick is None:
        return ""
    kind = "the fastest float execution" if results.float_yardstick else "the baseline, as no float was measured"
    eager = "the model as PyTorch runs it" if _eager(results) == "eager PyTorch" else "eager PyTorch was not measured"
    return f"Speed is a multiple of that of {results.yardstick}, {kind}; “eager” of that of {results.eager} ({eager})."


#: Explanations of the references. On a further device the name has a suffix. Other names explain themselves.
_REFERENCES = {
    "eager": "as PyTorch runs it by default, one operator after the other, with nothing compiled or folded",
    "eager channels-last": "the same, with the channels innermost in memory, as most convolutions want them",
    "torch.compile": "compiled by PyTorch's Inductor as its documentation says to for inference: the weights are "
    "constants of the code, and each batch size has code of its own",
    "onnxruntime FP32": "the float graph, its norms folded into its convolutions, run by ONNX Runtime",
    "openvino FP32": "the float graph, its norms folded into its convolutions, run by OpenVINO",
}


def explained(results: Results) -> list[str]:
    """Explain the references."""
    kinds = dict.fromkeys(line.name.partition("[")[0] for line in results.references)
    known = [f"“{kind}”: {_REFERENCES[kind]}" for kind in kinds if kind in _REFERENCES]
    if not known:
        return []
    return [f"The references run the weights of {results.references_of or 'the baseline'}. {'; '.join(known)}."]


def tail(results: Results) -> str:
    """Say on how many calls p95 and p99 are based."""
    samples = [line.measured.latency_ms.samples for line in lines(results, every=True) if line.measured]
    if not samples:
        return ""
    low, high = min(samples), max(samples)
    spread = plural(high, "call") if low == high else f"{count(low)} to {count(high)} calls"
    few = "; the 99th percentile of fewer than 100 is close to the slowest of them" if low < 100 else ""
    return f"p50, p95 and p99 are of {spread} each, one image at a time{few}."


def method(results: Results) -> list[str]:
    """Say how the numbers were measured."""
    timing = results.measurement.timing
    sizes = ", ".join(count(b) for b in timing.batch_sizes)
    processes = len(timing.starts)
    p50 = "the geometric mean of the processes' medians" if processes > 1 else "the median of the rounds' medians"
    return [
        "Every pair of artifact and execution, and every reference, was measured in "
        f"{plural(timing.rounds, 'round')} that take turns, so that a slow minute of the machine does not favour one "
        f"of them; p50 is {p50}, p95 and p99 are of all calls.",
        *_processes(processes),
        *(said for said in (*explained(results), tail(results)) if said),
        f"{plural(timing.warm_up, 'call')} before each measurement warm it up and are not counted.",
        f"Throughput was taken at batch sizes {sizes}; the best of them is in the table.",
        *_coverage(results),
        "Files are opened by the same runtime that serves them, from the same bytes on disk.",
        find_task(results.task).method,
        "SQNR is the energy of the reference's outputs over that of the difference, in decibels; “exact” means equal "
        "to the last bit.",
        "Memory is the peak of the process above that of an idle one.",
        *_gpu_memory(results),
        _taken(results.measurement),
        *_others(results.measurement),
    ]


def _processes(processes: int) -> list[str]:
    if processes == 1:
        return []
    return [
        f"Each was started {processes} times, across the measuring time: one process of a network may be half as fast "
        "again as the next. torch.compile keeps its process, for it compiles for minutes."
    ]


def _others(measurement: Measurement) -> list[str]:
    clocks = []
    if measurement.clocks is not None:
        clocks = [f"The cores ran at {measurement.clocks[0]} to {measurement.clocks[1]} MHz."]
    if measurement.others is None or measurement.busiest is None:
        return clocks
    return [
        *clocks,
        f"Meanwhile other processes took {percent(measurement.others)} % of the cores on average, and "
        f"{percent(measurement.busiest)} % in the turn in which they took most.",
    ]


def _coverage(results: Results) -> list[str]:
    ratios = [line.measured.speedup for line in lines(results) if line.measured]
    if not ratios:
        return []
    if 1 < len(results.measurement.timing.starts) < ENOUGH:
        return [
            "The interval of a ratio of speeds is Student's, of the logarithms of the processes' ratios, and holds the "
            f"true ratio with {100 * ratios[0].coverage:.0f} % confidence."
        ]
    return [
        "The interval of a ratio of speeds lies between two of the rounds' ratios and holds the true median with "
        f"{100 * ratios[0].coverage:.1f} % confidence."
    ]


def _gpu_memory(results: Results) -> list[str]:
    if not any(pair.measured and pair.execution.device_type == "cuda" for row in results.rows for pair in row.pairs):
        return []
    return [
        "Of what ran on a GPU it is by how much more of the device was in use, by whomever, once the artifact was "
        "opened and warm than before: the context and all libraries' allocations count, and so does what other "
        "processes took or gave back meanwhile."
    ]


def _taken(measurement: Measurement) -> str:
    if measurement.cached:
        return (
            f"The speeds were measured on {moment(measurement.taken)}, in {seconds(measurement.seconds)}, and come "
            "from the cache: nothing that they depend on has changed since on this machine."
        )
    return f"The speeds were measured on {moment(measurement.taken)}, in {seconds(measurement.seconds)}."


def notes(report: Report) -> list[str]:
    """Return the notes of each artifact."""
    return [f"{row.name}: {note}" for row in report.rows for note in row.notes]


def changes(results: Results) -> list[str]:
    """Return the changes by passes of whole networks, before and after."""
    return [
        f"{row.name}: {effect.figure} {figure(effect.before)} → {figure(effect.after)}"
        for row in results.rows
        for effect in row.effects
        if effect.layer == WHOLE
    ]


def facts(report: Report) -> list[tuple[str, list[Fact]]]:
    """Return the machine, the data and the versions, as groups of name and value."""
    return [("Machine", _machine(report)), ("Data", _data(report)), ("Versions", _versions(report))]


def _machine(report: Report) -> list[Fact]:
    machine, gpu = report.machine, report.machine.gpu
    quota = "" if machine.quota is None else f" with a quota of {machine.quota:g}"
    return [
        ("Processor", machine.cpu),
        ("Cores, threads", f"{count(machine.cores)} cores{quota}, {count(machine.threads)} threads used"),
        ("Instructions", ", ".join(machine.isa) or NONE),
        ("Memory", size(machine.memory_bytes)),
        ("GPU", f"{gpu.name}, {size(gpu.memory_bytes)}, CUDA {gpu.cuda}, cuDNN {gpu.cudnn}" if gpu else "none"),
        ("Measured on", "GPU (CUDA)" if report.device == "cuda" else "CPU"),
        ("System", machine.os),
    ]


def _data(report: Report) -> list[Fact]:
    data, prep = report.data, report.data.preprocessing
    if prep.resize == LETTERBOX:
        scaled = f"letterbox in {plain(prep.crop)}"
    else:
        resized = f"shorter side to {prep.resize}" if isinstance(prep.resize, int) else f"to {plain(prep.resize)}"
        scaled = f"{resized}, centre crop {plain(prep.crop)}"
    return [
        ("Data set", data.name),
        ("Images", f"{count(data.train)} to train, {_judges(data)} to judge"),
        ("Classes", count(data.classes)),
        ("Preprocessing", f"{scaled}, {prep.interpolation} interpolation"),
        ("Mean, std", f"{plain(prep.mean)}; {plain(prep.std)}"),
        *([("White in deep greys", f"{prep.pixel_max:g}")] if prep.pixel_max is not None else []),
        *_origins(data.preprocessing_origin),
        ("Fingerprint", f"{data.fingerprint[:16]} ({data.fingerprint_kind})"),
    ]


def _origins(origins: dict[str, str]) -> list[Fact]:
    """Return the origin of the preprocessing: one line, or one for each origin with the parts that it decided."""
    parts: dict[str, list[str]] = {}
    for part, origin in origins.items():
        parts.setdefault(origin, []).append(part)
    if len(parts) < 2:
        return [("Decided by", origin) for origin in parts]
    return [("Decided by", "; ".join(f"{origin}: {', '.join(names)}" for origin, names in parts.items()))]


def _versions(report: Report) -> list[Fact]:
    found = [("Python", report.machine.python)]
    return found + [(name, version) for name, version in report.versions.items() if name != "python"]


def _judges(data: Data) -> str:
    return f"{count(data.val)} of {count(data.val_of)}" if data.val_of else count(data.val)
