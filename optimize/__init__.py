"""The Python API: turn a trained vision model into measured, deployable artifacts.

Each public name is imported on first use, so that the command line starts at once.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from serve.runtime.card.execution import ENVIRONMENT

if TYPE_CHECKING:
    from optimize.api import (
        apply,
        apply_each,
        compare,
        compare_runs,
        load,
        package,
        profile,
        restore,
        save,
        search,
        sensitivity,
    )
    from optimize.data.from_python import image_data
    from optimize.errors import NotApplicableError, PassError
    from optimize.measure.timing import Timing
    from optimize.models.preprocessing_config import PreprocessingConfig
    from optimize.passes.dynamic import Dynamic
    from optimize.passes.equalize import Equalize
    from optimize.passes.expand import Expand
    from optimize.passes.fine_tune import FineTune
    from optimize.passes.fuse import Fuse
    from optimize.passes.half import Half
    from optimize.passes.merge import Merge
    from optimize.passes.onnx import Onnx
    from optimize.passes.onnx_half import OnnxHalf
    from optimize.passes.onnx_int8 import OnnxInt8
    from optimize.passes.onnx_packed import OnnxPacked
    from optimize.passes.prune_channels import PruneChannels
    from optimize.passes.prune_magnitude import PruneMagnitude
    from optimize.passes.prune_nm import PruneNm
    from optimize.passes.ptq import Ptq
    from optimize.passes.ptq_lowbit import PtqLowbit
    from optimize.passes.qat import Qat
    from optimize.passes.qat_lowbit import QatLowbit
    from optimize.passes.reestimate import Reestimate
    from optimize.report.comparison import Comparison
    from optimize.training.config import TrainingConfig as Training
    from optimize.training.distil import Distil
    from optimize.variant import Failed, Variant
    from serve.common.options import ServingOptions
    from serve.runtime.card.card import Preprocessing
    from serve.runtime.errors import PipelineError, UserError

__all__ = [
    "Comparison",
    "Distil",
    "Dynamic",
    "Equalize",
    "Expand",
    "Failed",
    "FineTune",
    "Fuse",
    "Half",
    "Merge",
    "NotApplicableError",
    "Onnx",
    "OnnxHalf",
    "OnnxInt8",
    "OnnxPacked",
    "PassError",
    "PipelineError",
    "Preprocessing",
    "PreprocessingConfig",
    "PruneChannels",
    "PruneMagnitude",
    "PruneNm",
    "Ptq",
    "PtqLowbit",
    "Qat",
    "QatLowbit",
    "Reestimate",
    "ServingOptions",
    "Timing",
    "Training",
    "UserError",
    "Variant",
    "apply",
    "apply_each",
    "compare",
    "compare_runs",
    "image_data",
    "load",
    "package",
    "profile",
    "restore",
    "save",
    "search",
    "sensitivity",
]

_HOMES = {
    **dict.fromkeys(
        (
            "apply",
            "apply_each",
            "compare",
            "compare_runs",
            "load",
            "package",
            "profile",
            "restore",
            "save",
            "search",
            "sensitivity",
        ),
        "optimize.api",
    ),
    "Comparison": "optimize.report.comparison",
    "image_data": "optimize.data.from_python",
    "Preprocessing": "serve.runtime.card.card",
    "ServingOptions": "serve.common.options",
    "Timing": "optimize.measure.timing",
    "Dynamic": "optimize.passes.dynamic",
    "PreprocessingConfig": "optimize.models.preprocessing_config",
    "Equalize": "optimize.passes.equalize",
    "Expand": "optimize.passes.expand",
    "Reestimate": "optimize.passes.reestimate",
    "FineTune": "optimize.passes.fine_tune",
    "Fuse": "optimize.passes.fuse",
    "Half": "optimize.passes.half",
    "Merge": "optimize.passes.merge",
    "Onnx": "optimize.passes.onnx",
    "OnnxHalf": "optimize.passes.onnx_half",
    "OnnxInt8": "optimize.passes.onnx_int8",
    "OnnxPacked": "optimize.passes.onnx_packed",
    "PruneChannels": "optimize.passes.prune_channels",
    "PruneMagnitude": "optimize.passes.prune_magnitude",
    "PruneNm": "optimize.passes.prune_nm",
    "Ptq": "optimize.passes.ptq",
    "PtqLowbit": "optimize.passes.ptq_lowbit",
    "Qat": "optimize.passes.qat",
    "QatLowbit": "optimize.passes.qat_lowbit",
    "Distil": "optimize.training.distil",
    "Training": "optimize.training.config",
    **dict.fromkeys(("Failed", "Variant"), "optimize.variant"),
    **dict.fromkeys(("NotApplicableError", "PassError"), "optimize.errors"),
    **dict.fromkeys(("PipelineError", "UserError"), "serve.runtime.errors"),
}

# Must run before torch is imported: its libgomp reads these variables at that moment.
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        from serve.runtime.errors import did_you_mean

        # Python's own tools often look up names with underscores.
        near = did_you_mean(name, __all__) if not name.startswith("_") else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{near}")
    home = importlib.import_module(_HOMES[name])
    return getattr(home, "TrainingConfig" if name == "Training" else name)


def __dir__() -> list[str]:
    return __all__
