"""A report whose numbers no machine measured; it has one of everything that a report can hold."""

from __future__ import annotations

import math
from typing import Any

from optimize.measure.rows import Report

RULE = "the fastest artifact whose accuracy interval stays above minus one point"
SELECTION = "It is the best of 11 pairs on the same images, so its figures are slightly too good."
NO_GPU = "needs a CUDA device, and this machine has none"


def ratio(value: float, low: float, high: float, *, slower: bool = False) -> dict[str, Any]:
    return {"value": value, "low": low, "high": high, "coverage": 0.984, "slower": slower}


def timed(ms: float, samples: int = 250) -> dict[str, Any]:
    return {
        "latency_ms": {"p50": ms, "p95": ms * 1.11, "p99": ms * 1.33, "samples": samples},
        "throughput": {str(b): 1000 / ms * (1 + math.log2(b) / 8) for b in (1, 4, 16, 32)},
        "speedup": ratio(13.3 / ms, 13.2 / ms, 13.4 / ms),
        "vs_eager": ratio(25.5 / ms, 25.3 / ms, 25.7 / ms),
    }


def measured(top1: float, ms: float, mb: float, parent: str | None) -> dict[str, Any]:
    delta = top1 - 0.9111
    difference = {"delta": delta, "low": delta - 0.0062, "high": delta + 0.0058, "gained": 11, "lost": 13}
    accuracy = {
        "top1": top1,
        "top5": 0.9922,
        "interval": [top1 - 0.0123, top1 + 0.0117],
        "images": 2222,
        "answers": "a" * 64,
    }
    parity = {
        "reference": parent,
        "max_abs": 0.0123,
        "mean_abs": 0.000456,
        "sqnr_db": 33.3,
        "top1_agreement": 0.9876,
        "images": 2222,
        "logits_of": 512,
    }
    return {
        **timed(ms),
        "accuracy": accuracy | {"difference": difference if parent else None},
        "footprint": {"memory_bytes": int(3 * mb * 1e6), "load_ms": 77.7},
        "parity": parity if parent else None,
        "vs_parent": ratio(1.23, 1.11, 1.44) if parent else None,
    }


def pair(artifact: str, engine: str, figures: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "id": f"{artifact}@{engine}",
        "execution": {"engine": engine, "device": "cpu", "threads": None, "buckets": [], "options": {}},
        "provider": f"{engine}/cpu" if figures else None,
        "measured": figures,
        "skip": None if figures else {"kind": "cannot_run_here", "reason": NO_GPU},
    }


def row(name: str, parent: str | None, precision: str, figures: tuple[float, float, float]) -> dict[str, Any]:
    top1, ms, mb = figures
    onnx = name.startswith("onnx")
    return {
        "name": name,
        "operation": name.rsplit("-", 1)[-1] if parent else "baseline",
        "config": {"synthetic": True, "steps": [1, 2]},
        "parent": parent,
        "cached": False,
        "made": "2001-01-31T02:03:04Z",
        "seconds": 12.5,
        "file": {
            "path": f"artifacts/{name}/model",
            "bytes": int(mb * 1e6),
            "key": "0" * 64,
            "format": "onnx" if onnx else "torchscript",
            "precision": precision,
        },
        "archive": {"path": f"archives/toy-{name}.mar", "bytes": int(mb * 1.1e6), "sha256": "1" * 64},
        "pairs": [pair(name, "openvino" if onnx else "torchscript", measured(top1, ms, mb, parent))],
        "skip": None,
        "notes": [],
    }


def body() -> dict[str, Any]:
    """As JSON values, to be changed before `Report.from_json`."""
    rows = [
        row("baseline", None, "float32", (0.9111, 22.2, 44.4)),
        row("fuse", "baseline", "float32", (0.9111, 15.5, 44.3)),
        row("half", "fuse", "bfloat16", (0.9106, 18.8, 22.2)),
        row("dynamic", "fuse", "int8", (0.9109, 16.6, 43.3)),
        row("ptq", "fuse", "int8", (0.9088, 4.44, 11.1)),
        row("qat", "fuse", "int8", (0.9133, 4.55, 11.1)),
        row("onnx", "fuse", "float32", (0.9111, 13.3, 44.2)),
        row("onnx-half", "onnx", "float16", (0.9111, 1.0, 22.1)),
        row("onnx-int8", "ptq", "int8", (0.9077, 6.66, 11.3)),
        row("onnx-int8-qat", "qat", "int8", (0.9122, 6.77, 11.3)),
    ]
    by_name = {r["name"]: r for r in rows}
    by_name["half"]["pairs"][0]["measured"]["vs_parent"] = ratio(0.82, 0.77, 0.88, slower=True)
    by_name["half"]["notes"] = ["bfloat16 in place of FP16: this processor has no FP16 kernels"]
    by_name["onnx"]["pairs"] += [
        pair("onnx", "onnxruntime", measured(0.9111, 14.4, 44.2, "fuse")),
        pair("onnx", "onnxruntime-cuda", None),
    ]
    by_name["onnx-int8"]["pairs"].insert(0, pair("onnx-int8", "onnxruntime", measured(0.9079, 8.88, 11.3, "ptq")))
    by_name["onnx-half"] |= {"pairs": [], "skip": {"kind": "cannot_run_here", "reason": NO_GPU}}
    by_name["fuse"]["cached"] = True
    by_name["onnx"]["pairs"][0]["measured"]["parity"] |= {"sqnr_db": None, "max_abs": 0.0, "mean_abs": 0.0}
    return {
        "schema": 5,
        "task": "classification",
        "title": "toynet",
        "model": "toynet",
        "created": "2001-02-03T04:05:06Z",
        "seconds": 321.0,
        "data": {
            "name": "synthetic squares",
            "fingerprint": "f" * 64,
            "fingerprint_kind": "content",
            "val_fingerprint": "e" * 64,
            "classes": 7,
            "train": 8888,
            "val": 2222,
            "preprocessing": {
                "resize": 256,
                "crop": [224, 224],
                "mean": [0.5, 0.4, 0.3],
                "std": [0.2, 0.2, 0.2],
                "interpolation": "bilinear",
            },
            "preprocessing_origin": {
                "resize": "the weights",
                "crop": "the weights",
                "mean": "--mean",
                "std": "ImageNet's, as nobody said otherwise",
                "interpolation": "the weights",
            },
        },
        "machine": {
            "cpu": "Imaginary CPU 9000",
            "cores": 2,
            "threads": 2,
            "memory_bytes": 16_000_000_000,
            "os": "Linux",
            "python": "3.11.2",
            "isa": ["AVX2", "AVX512_VNNI"],
            "gpu": None,
        },
        "device": "cpu",
        "versions": {"torch": "2.0.0", "onnxruntime": "1.0.0"},
        "recommended": "qat",
        "recommendation": {
            "name": "qat",
            "pair": "qat@torchscript",
            "execution": {"engine": "torchscript"},
            "rule": RULE,
            "selection": SELECTION,
            "rejected": {"ptq@torchscript": "its interval reaches below the limit", "onnx-int8@onnxruntime": "slower"},
        },
        "rows": rows,
        "yardstick": "onnx@openvino",
        "eager": "eager",
        "references": [
            {"name": "eager", "measured": timed(25.5), "skip": None},
            {
                "name": "torch.compile",
                "measured": None,
                "skip": {"kind": "cannot_run_here", "reason": "no C++ compiler on this machine"},
            },
        ],
        "measurement": {
            "timing": {"rounds": 5, "batch_sizes": [1, 4, 16, 32], "seconds": 0.2, "minimum": 3, "warm_up": 10},
            "taken": "2001-02-02T03:04:05Z",
            "seconds": 66.0,
            "cached": False,
        },
    }


def synthetic(**changes: Any) -> Report:
    """The report, with other values of its top fields."""
    return Report.from_json(body() | changes)
