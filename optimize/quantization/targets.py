"""Which integers a backend speaks: the ranges that its kernels compute without saturating.

A target is not a device: the same CPU runs torch's x86 kernels and ONNX Runtime, and a graph for
TensorRT (symmetric int8 activations) is another target than one for a CPU (unsigned activations).
torch has no kernels for TensorRT's integers: it computes what they mean, in float arithmetic between
explicit quantizers.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.ao.quantization import QConfig, QConfigMapping, get_default_qat_qconfig_mapping, get_default_qconfig_mapping
from torch.ao.quantization.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    ObservationType,
    get_tensorrt_backend_config,
)
from torch.ao.quantization.backend_config.x86 import get_x86_backend_config
from torch.ao.quantization.fake_quantize import FusedMovingAvgObsFakeQuantize
from torch.ao.quantization.observer import (
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    ObserverBase,
    PerChannelMinMaxObserver,
)
from torch.ao.quantization.qconfig import default_reuse_input_qconfig
from torch.nn import functional

from optimize.quantization.observer_choice import Observer, maker
from optimize.tracing.zero_padding import LAYERS as ZEROS
from serve.runtime.device.cpu_integers import ANY_X86, TENSORRT, VNNI_X86, WEIGHT_MAX, has_vnni, saturates
from serve.runtime.errors import UserError

_TRANSPOSED = (torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d, torch.nn.ConvTranspose3d)
_MEANS = (
    *(torch.nn.AdaptiveAvgPool1d, torch.nn.AdaptiveAvgPool2d, torch.nn.AvgPool1d, torch.nn.AvgPool2d),
    *(functional.adaptive_avg_pool1d, functional.adaptive_avg_pool2d, functional.avg_pool1d, functional.avg_pool2d),
    *(torch.mean, "mean"),
)
DROPOUTS = (torch.nn.Dropout, torch.nn.Dropout2d, torch.nn.Dropout3d, torch.nn.AlphaDropout)


@dataclass(frozen=True)
class Target:
    """Integer ranges of a backend.

    Activations are ``quint8`` within ``[0, activation_max]``, or ``qint8`` with zero-point 0 within
    ``[activation_min, activation_max]`` where the least is negative; weights are symmetric ``qint8`` within
    ``[−weight_max, weight_max]``, one scale per output channel, so that −w is representable whenever w is.

    Attributes:
        name: the word for it in recipes and cards; see `serve.runtime.device.cpu_integers`.
        activation_max: largest integer of an activation.
        activation_min: least integer of an activation.
        weight_max: largest integer of a weight.
        packed: whether torch has kernels for these integers; else its program is the reference form.
        opset: of its ONNX graphs; None: the exporter's own.
    """

    name: str
    activation_max: int
    activation_min: int = 0
    weight_max: int = 127
    packed: bool = True
    opset: int | None = None

    @property
    def described(self) -> str:
        """Its integers, in words."""
        activations = f"activations {self.activation_min} to {self.activation_max}"
        return f"{activations}, weights -{self.weight_max} to {self.weight_max} ({self.name})"

    def post_training(self, observer: Observer) -> QConfigMapping:
        """What FX ``prepare_fx`` inserts: ``observer`` on activations, min-max on weights."""
        usual = get_default_qconfig_mapping("x86") if self.packed else QConfigMapping()
        return self._mapped(usual, self.observing(observer))

    def observing(self, observer: Observer) -> QConfig:
        """How one layer is calibrated: ``observer`` on what it gives, min-max on its weight."""
        weight = PerChannelMinMaxObserver.with_args(
            dtype=torch.qint8,
            qscheme=torch.per_channel_symmetric,
            quant_min=-self.weight_max,
            quant_max=self.weight_max,
        )
        return QConfig(activation=maker(observer).with_args(**self._range), weight=weight)  # type: ignore[no-untyped-call]

    def fewer(self, bits: int) -> Target:
        """The same with activations of so many bits, all of them used."""
        signed = self.activation_min < 0
        low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
        return dataclasses.replace(self, activation_min=low, activation_max=high)

    def observer(self, name: Observer) -> ObserverBase:
        """A new observer of activations."""
        made: ObserverBase = maker(name)(**self._range)
        return made

    @property
    def _range(self) -> dict[str, Any]:
        range_: dict[str, Any] = {"quant_min": self.activation_min, "quant_max": self.activation_max}
        if self.activation_min < 0:
            return range_ | {"dtype": torch.qint8, "qscheme": torch.per_tensor_symmetric}
        return range_ | {"dtype": torch.quint8}

    def quantization_aware(self, horizon: int) -> QConfigMapping:
        """What FX ``prepare_qat_fx`` inserts: fake-quantize with moving-average observers.

        ``horizon``: the newest batch has the weight 1/horizon in an activation's running range.
        """
        activation = FusedMovingAvgObsFakeQuantize.with_args(  # type: ignore[no-untyped-call]
            observer=MovingAverageMinMaxObserver,
            **self._range,
            averaging_constant=1 / horizon,
        )
        weight = FusedMovingAvgObsFakeQuantize.with_args(  # type: ignore[no-untyped-call]
            observer=MovingAveragePerChannelMinMaxObserver,
            dtype=torch.qint8,
            qscheme=torch.per_channel_symmetric,
            quant_min=-self.weight_max,
            quant_max=self.weight_max,
            # Weights are known exactly: their range is that of now, not an average over the past.
            averaging_constant=1.0,
        )
        qconfig = QConfig(activation=activation, weight=weight)  # type: ignore[no-untyped-call]
        return self._mapped(get_default_qat_qconfig_mapping("x86") if self.packed else QConfigMapping(), qconfig)

    def backend_config(self) -> BackendConfig:
        """The patterns that the backend's kernels fuse."""
        config = get_x86_backend_config() if self.packed else _tensorrt_backend_config()
        kind = torch.quint8 if self.packed else torch.qint8
        for layer in ZEROS:  # torch.ao (2.11 to 2.14) would compute them in float, and give them another scale
            pattern = BackendPatternConfig(layer).add_dtype_config(DTypeConfig(input_dtype=kind, output_dtype=kind))
            config.set_backend_pattern_config(
                pattern.set_observation_type(ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT)
            )
        return config

    def _mapped(self, mapping: QConfigMapping, qconfig: QConfig) -> QConfigMapping:
        # The default mapping carries what some operators need (fixed ranges of sigmoid and softmax,
        # per-tensor weights of transposed convolutions); only the general case is ours.
        mapping = mapping.set_global(qconfig)
        # Served, dropout does nothing, and torch's packed form lets its input through; a range of its own
        # would be trained and exported (a second rounding and clipping) and then not be served.
        # TensorRT's backend config says so itself.
        for dropout in (*DROPOUTS, functional.dropout) if self.packed else ():
            mapping = mapping.set_object_type(dropout, default_reuse_input_qconfig)
        # Learned places: torch.ao (2.14) quantizes no table with these, and training for integers fails on one.
        for table in (torch.nn.Embedding, torch.nn.EmbeddingBag):
            mapping = mapping.set_object_type(table, None)
        # torch's x86 kernels of these give other numbers than its reference form (2.14: 70 steps off, seen).
        for transposed in _TRANSPOSED:
            mapping = mapping.set_object_type(transposed, None)
        return mapping


def _tensorrt_backend_config() -> BackendConfig:
    """What torch has for TensorRT, with what it leaves out: dropouts give what they are given, means have a range.

    torch.ao (2.11 to 2.14) has means share the scale of what they are means of, of which they span a part, right in
    front of the last layer: 1 dB of what tells a ResNet-20's images apart, 10 dB in small networks. TensorRT quantizes
    a pool between a DequantizeLinear and a QuantizeLinear of another scale ("Explicit Quantization").
    """
    config = get_tensorrt_backend_config()
    integers = DTypeConfig(input_dtype=torch.qint8, output_dtype=torch.qint8)
    own, shared = (
        ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT,
        ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT,
    )
    dropouts = (*DROPOUTS, functional.dropout)
    for pattern, observed in (*((mean, own) for mean in _MEANS), *((dropout, shared) for dropout in dropouts)):
        config.set_backend_pattern_config(
            BackendPatternConfig(pattern).set_observation_type(observed).add_dtype_config(integers)
        )
    return config


#: The target of a machine's CPU (auto), or one by name.
TargetName = Literal["auto", "x86-vnni", "x86", "tensorrt"]

#: The largest activation of CPUs.
_UNSIGNED_MAX = 255

#: TensorRT's integers are symmetric, of activations −128 to 127 ("Working with Quantized Types" in its documentation).
#: Its parser reads opsets 9 to 24 (onnx-tensorrt, docs/operators.md of 10.15); from 21 on a Q/DQ may have attributes
#: that earlier releases of 10 do not know, and below 19 a scale in FP16 is not legal.
_TENSORRT_TARGET = Target(TENSORRT, activation_max=127, activation_min=-128, packed=False, opset=20)


def x86_target() -> Target:
    """The target of this machine's CPU.

    With VNNI, products of unsigned and signed bytes are summed in 32 bits and the whole range is
    safe. Without it, fbgemm, oneDNN and ONNX Runtime add pairs in 16 bits, which saturates unless one of the two has
    7 bits. Weights have them, as in ONNX Runtime's and NNCF's quantizers: they have a scale for each channel, and
    lose less by it than activations do (torch's ``reduce_range``), whose every quantizer needs a clamp besides. On a
    ResNet-20 of CIFAR-10 of 8 bits in all, 28 dB remain; of 7-bit weights 26 dB, of 7-bit activations 23 to 24.
    """
    return target_named(VNNI_X86 if has_vnni() else ANY_X86)


def target_named(name: TargetName) -> Target:
    """The target that a setting names; ``auto`` is this machine's."""
    if name == "auto":
        return x86_target()
    if name == TENSORRT:
        return _TENSORRT_TARGET
    return Target(name, _UNSIGNED_MAX, weight_max=127 if name == VNNI_X86 else WEIGHT_MAX)


def check_target(name: TargetName) -> None:
    """Refuse a target whose integers cannot be computed here, and so not be checked.

    Raises:
        UserError: this CPU would saturate.
    """
    if name != "auto" and saturates(name) is not None:
        raise UserError(
            f"target: {name} cannot be built here: its answers are checked, and this CPU, which has no VNNI, would "
            f"saturate; target: {ANY_X86} runs on every x86 CPU, with weights of 7 bits"
        )
