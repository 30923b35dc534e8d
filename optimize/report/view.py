"""A report's numbers as words: what the table, the page and the plots say about each artifact, worked out once.

Nothing is measured or judged here, and nothing is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Report = Mapping[str, Any]
Family = Literal["float", "half", "int"]

NONE = "–"
SLOWER = "slower than its parent"


@dataclass(frozen=True)
class Row:
    """One artifact or baseline, with every cell as the text that is shown (``–`` where there is no number)."""

    name: str
    kind: Literal["artifact", "baseline"]
    made_by: str
    parents: str
    config: str
    precision: str
    family: Family
    format: str
    top1: str
    delta: str
    interval: str
    gained: str
    lost: str
    top5: str
    images: str
    p50: str
    p95: str
    p99: str
    speedup: str
    vs_parent: str
    vs_parent_interval: str
    throughput: str
    best_batch: str
    size: str
    memory: str
    load: str
    seconds: str
    runs_on: str
    parity: Parity
    archive: str
    notes: tuple[str, ...]
    rejected: str
    slower: bool
    recommended: bool
    skipped: str
    speedup_share: float
    """The speed-up as a share of the largest in the report (0 to 1): the length of the bar behind the number."""


@dataclass(frozen=True)
class Parity:
    """How far an artifact's outputs are from those of the artifact it was checked against."""

    reference: str
    largest: str
    mean: str
    sqnr: str
    agreement: str
    images: str


@dataclass(frozen=True)
class Bar:
    """One labelled bar; ``share`` is its length as a part of the longest (0 to 1)."""

    name: str
    share: float
    value: str
    note: str


def rows(report: Report) -> list[Row]:
    """Every artifact in the report's order, then every baseline."""
    rejected = (report.get("recommendation") or {}).get("rejected") or {}
    recommended = report.get("recommended")
    everything = [*_list(report, "artifacts"), *_list(report, "baselines")]
    fastest = max((s for r in everything if (s := _finite(r.get("speedup"))) and not r.get("skipped")), default=0.0)
    artifacts = len(_list(report, "artifacts"))
    return [
        _row(
            record,
            kind="artifact" if position < artifacts else "baseline",
            recommended=position < artifacts and recommended is not None and record.get("name") == recommended,
            rejected=str(rejected.get(record.get("name")) or "") if position < artifacts else "",
            fastest=fastest,
        )
        for position, record in enumerate(everything)
    ]


def _row(
    record: Report, *, kind: Literal["artifact", "baseline"], recommended: bool, rejected: str, fastest: float
) -> Row:
    skipped = str(record.get("skipped") or "")
    # What could not be run here has no number, whatever the record still carries.
    n: Report = {} if skipped else record
    latency, ci = n.get("latency_ms") or {}, n.get("top1_delta_ci95")
    discordant, versus = n.get("discordant") or {}, n.get("vs_parent") or {}
    slower = bool(versus.get("slower"))
    precision = str(record.get("precision") or ("float32" if kind == "baseline" else NONE))
    threads = n.get("threads")
    return Row(
        name=str(record.get("name")),
        kind=kind,
        made_by=str(record.get("pass") or ""),
        parents=", ".join(str(p) for p in record.get("parents") or ()),
        config=", ".join(f"{k} {_plain(v)}" for k, v in (record.get("config") or {}).items()),
        precision=precision,
        family=family(precision),
        format=str(record.get("format") or "").replace("_", " "),
        top1=percent(n.get("top1")),
        delta=points(n.get("top1_delta")),
        interval=f"{points(ci[0])} to {points(ci[1])}" if ci else "",
        gained=_signed(discordant.get("gained"), "+"),
        lost=_signed(discordant.get("lost"), "−"),
        top5=percent(n.get("top5")),
        images=count(n.get("images")),
        p50=number(latency.get("p50")),
        p95=number(latency.get("p95")),
        p99=number(latency.get("p99")),
        speedup=times(n.get("speedup")),
        vs_parent=times(versus.get("speedup")),
        vs_parent_interval=f"{times(versus.get('low'))} to {times(versus.get('high'))}" if versus else "",
        throughput=number(best_throughput(n)),
        best_batch=count(n.get("best_batch")),
        size=size(n.get("bytes")),
        memory=size(n.get("memory_bytes")),
        load=number(n.get("load_ms"), "ms"),
        seconds="from cache" if record.get("cached") else seconds(n.get("seconds")),
        runs_on=", ".join(
            [*([str(n["provider"])] if n.get("provider") else []), *([_plural(threads, "thread")] if threads else [])]
        ),
        parity=_parity(n.get("parity")),
        archive=str(record.get("archive") or ""),
        notes=tuple(str(note) for note in record.get("notes") or ()),
        rejected=rejected,
        slower=slower,
        recommended=recommended,
        skipped=skipped,
        speedup_share=(_finite(n.get("speedup")) or 0.0) / fastest if fastest else 0.0,
    )


def _parity(record: Report | None) -> Parity:
    if not record:
        return Parity(NONE, NONE, NONE, NONE, NONE, NONE)
    exact = record.get("sqnr_db") is None and record.get("max_abs") == 0
    return Parity(
        reference=str(record.get("reference") or NONE),
        largest="0" if exact else small(record.get("max_abs")),
        mean="0" if exact else small(record.get("mean_abs")),
        sqnr="exact" if exact else number(record.get("sqnr_db"), "dB"),
        agreement=percent(record.get("top1_agreement")),
        images=count(record.get("images")),
    )


def verdict(report: Report) -> str:
    """What the report found, in one sentence."""
    name = report.get("recommended")
    chosen = next((a for a in _list(report, "artifacts") if name is not None and a.get("name") == name), None)
    if chosen is None:
        return "No artifact is recommended."
    start = next((a for a in _list(report, "artifacts") if not a.get("parents")), {})
    facts = []
    p50, before = (_finite((a.get("latency_ms") or {}).get("p50")) for a in (chosen, start))
    if chosen is start:
        facts.append("no other artifact was better by the rule below")
    elif _finite(chosen.get("speedup")):
        spoken = f"{times(chosen['speedup'])} the speed of the baseline"
        facts.append(f"{spoken} ({number(p50)} instead of {number(before)} ms at p50)" if p50 and before else spoken)
    now, once = _finite(chosen.get("bytes")), _finite(start.get("bytes"))
    if now and once and chosen is not start:
        facts.append(f"{size(now)} instead of {size(once)}")
    if _finite(chosen.get("top1")) is not None:
        ci = chosen.get("top1_delta_ci95")
        bounds = f", 95 % interval {points(ci[0])} to {points(ci[1])}" if ci else ""
        delta = chosen.get("top1_delta")
        change = f" ({points(delta)} points{bounds})" if delta is not None and chosen is not start else ""
        facts.append(f"top-1 {percent(chosen['top1'])} %{change}")
    return f"{name} is recommended" + (": " + "; ".join(facts) if facts else "") + "."


def method(report: Report) -> list[str]:
    """How the numbers were taken, in sentences that hold only what the report states."""
    m = report.get("measurement") or {}
    sentences = []
    if m.get("rounds"):
        sentences.append(
            f"Every artifact and baseline was measured in {_plural(m['rounds'], 'round')} that take turns, so that a "
            "slow minute of the machine does not favour one of them; a figure is the median over the rounds."
        )
    if m.get("latency_samples"):
        sentences.append(f"Latency is that of one image at a time, {_plural(m['latency_samples'], 'sample')}.")
    if m.get("warmup") is not None:
        sentences.append(f"{_plural(m['warmup'], 'call')} before each measurement warm it up and are not counted.")
    if m.get("batch_sizes"):
        sizes = ", ".join(count(b) for b in m["batch_sizes"])
        sentences.append(f"Throughput was taken at batch sizes {sizes}; the best of them is in the table.")
    sentences += [
        "Files are opened by the same runtime that serves them, from the same bytes on disk.",
        "Accuracy differences compare the same images under both models; their 95 % interval is Tango's score interval "
        "for paired proportions, and is the wider the more images changed sides (gained and lost).",
        "SQNR is the energy of the reference's outputs over that of the difference, in decibels; “exact” means equal "
        "to the last bit.",
        "Memory is the peak of the process above that of an idle one.",
    ]
    if m.get("cached"):
        sentences.append("The timings come from the cache: nothing changed since they were taken on this machine.")
    elif _finite(m.get("seconds")):
        sentences.append(f"Measuring took {seconds(m['seconds'])}.")
    return sentences


def stage_bars(report: Report) -> list[Bar]:
    """The time of each stage."""
    stages = _list(report, "stages")
    longest = max((_finite(s.get("seconds")) or 0.0 for s in stages if not s.get("skipped")), default=0.0)
    bars = []
    for stage in stages:
        spent = 0.0 if stage.get("skipped") else _finite(stage.get("seconds")) or 0.0
        note = "from cache" if stage.get("cached") else ""
        value = "skipped" if stage.get("skipped") else seconds(stage.get("seconds"))
        bars.append(Bar(str(stage.get("name")), spent / longest if longest else 0.0, value, note))
    return bars


def facts(report: Report) -> list[tuple[str, list[tuple[str, str]]]]:
    """The machine, the data and the versions, as groups of name and value."""
    machine, data = report.get("machine") or {}, report.get("data") or {}
    gpu, prep = machine.get("gpu") or {}, data.get("preprocessing") or {}
    scaled = f"shorter side to {_plain(prep.get('resize'))}, centre crop {_plain(prep.get('crop'))}"
    on = [
        ("Processor", str(machine.get("cpu") or NONE)),
        ("Cores, threads", f"{count(machine.get('cores'))} cores, {count(machine.get('threads'))} threads used"),
        ("Instructions", ", ".join(str(i) for i in machine.get("isa") or ()) or NONE),
        ("Memory", size(machine.get("memory_bytes"))),
        ("GPU", f"{gpu.get('name')}, {size(gpu.get('memory_bytes'))}, driver {gpu.get('driver')}" if gpu else "none"),
        ("Measured on", "GPU (CUDA)" if report.get("device") == "cuda" else "CPU"),
        ("System", str(machine.get("os") or NONE)),
    ]
    about = [
        ("Data set", str(data.get("name") or NONE)),
        ("Images", f"{count(data.get('train'))} to train, {count(data.get('val'))} to judge"),
        ("Classes", count(data.get("classes"))),
        ("Preprocessing", f"{scaled}, {prep.get('interpolation') or 'no'} interpolation" if prep else NONE),
        ("Mean, std", f"{_plain(prep.get('mean'))}; {_plain(prep.get('std'))}" if prep else NONE),
        (
            "Fingerprint",
            f"{str(data.get('fingerprint') or NONE)[:16]} ({data.get('fingerprint_kind') or 'kind unknown'})",
        ),
    ]
    versions = [("Python", str(machine.get("python") or NONE))]
    versions += [(str(k), str(v)) for k, v in (report.get("versions") or {}).items() if str(k).lower() != "python"]
    return [("Machine", on), ("Data", about), ("Versions", versions)]


def family(precision: object) -> Family:
    """Which of three colours and shapes stands for a precision such as ``int8``, ``bfloat16`` or ``float32``."""
    word = str(precision or "").lower()
    return "int" if "int" in word else "half" if "16" in word or "half" in word else "float"


def best_throughput(record: Report) -> float | None:
    """The throughput at ``best_batch``, in images per second; the largest of all where that is not given."""
    measured = {str(k): f for k, v in (record.get("throughput") or {}).items() if (f := _finite(v)) is not None}
    return measured.get(str(record.get("best_batch")), max(measured.values(), default=None))


def number(value: object, unit: str = "") -> str:
    """About three significant digits, never an exponent."""
    x = _finite(value)
    if x is None:
        return NONE
    text = f"{x:,.0f}" if abs(x) >= 100 else f"{x:.1f}" if abs(x) >= 10 else f"{x:.2f}" if abs(x) >= 0.1 else f"{x:.3f}"
    return f"{text} {unit}".replace("-", "−").rstrip()


def small(value: object) -> str:
    """Two significant digits, with an exponent where it is shorter (1.2e−05)."""
    x = _finite(value)
    return NONE if x is None else f"{x:.2g}".replace("-", "−")


def percent(value: object) -> str:
    """A fraction as per cent with two decimals, without the sign."""
    x = _finite(value)
    return NONE if x is None else f"{100 * x:.2f}"


def points(value: object) -> str:
    """A difference of fractions as percentage points, always signed but for zero."""
    x = _finite(value)
    if x is None:
        return NONE
    text = f"{100 * x:+.2f}"
    return "0.00" if float(text) == 0 else text.replace("-", "−")


def times(value: object) -> str:
    """A ratio such as ``5.87×``."""
    x = _finite(value)
    return NONE if x is None else f"{x:.1f}×" if x >= 10 else f"{x:.2f}×"


def size(value: object) -> str:
    """Bytes in decimal kB, MB or GB."""
    x = _finite(value)
    if x is None:
        return NONE
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(x) >= scale:
            return number(x / scale, unit)
    return f"{x:.0f} B"


def seconds(value: object) -> str:
    """A duration in seconds, or minutes and seconds."""
    x = _finite(value)
    if x is None:
        return NONE
    if round(x) >= 120:
        minutes, rest = divmod(round(x), 60)
        return f"{minutes} min {rest:02d} s"
    return f"{x:.0f} s" if x >= 10 else f"{x:.1f} s"


def count(value: object) -> str:
    """A whole number with thousands separated."""
    x = _finite(value)
    return NONE if x is None else f"{x:,.0f}"


def _plural(value: object, noun: str) -> str:
    return f"{count(value)} {noun}" + ("" if value == 1 else "s")


def _signed(value: object, sign: str) -> str:
    x = _finite(value)
    return NONE if x is None else "0" if x == 0 else f"{sign}{count(x)}"


def _plain(value: object) -> str:
    if value is None:
        return NONE
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        return str(value)
    return " × ".join(map(str, value)) if all(isinstance(v, int) for v in value) else ", ".join(map(str, value))


def _finite(value: object) -> float | None:
    """``value`` as a float if it is a number that can be shown."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _list(report: Report, key: str) -> list[Report]:
    return list(report.get(key) or ())
