"""Targets: the integer ranges that a backend's kernels compute without saturating.

A target is not a device. The same CPU runs torch's x86 kernels and ONNX Runtime. A graph for TensorRT (symmetric int8
activations) is another target than one for a CPU (unsigned activations). Torch has no kernels for TensorRT's integers.
It computes what they mean in float arithmetic between explicit quantizers.
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

    Activations are ``quint8`` within ``[0, activation_max]``. If the least is negative, they are ``qint8`` with zero
    point 0 within ``[activation_min, activation_max]``. Weights are symmetric ``qint8`` within ``[−weight_max,
    weight_max]`` with one scale per output channel, so that −w is representable whenever w is.

    Attributes:
        name: its name in recipes and cards. See `serve.runtime.device.cpu_integers`.
        activation_max: largest integer of an activation.
        activation_min: least integer of an activation.
        weight_max: largest integer of a weight.
        packed: whether torch has kernels for these integers. Otherwise its program is the reference form.
        opset: opset of its ONNX graphs. None: the exporter's own.
    """

    name: str
    activation_max: int
    activation_min: int = 0
    weight_max: int = 127
    packed: bool = True
    opset: int | None = None

    @property
    def described(self) -> str:
        """Its integer ranges as text."""
        activations = f"activations {self.activation_min} to {self.activation_max}"
        return f"{activations}, weights -{self.weight_max} to {self.weight_max} ({self.name})"

    def post_training(self, observer: Observer) -> QConfigMapping:
        """Return the settings for FX ``prepare_fx``: ``observer`` on activations, min-max on weights."""
        usual = get_default_qconfig_mapping("x86") if self.packed else QConfigMapping()
        return self._mapped(usual, self.observing(observer))

    def observing(self, observer: Observer) -> QConfig:
        """Return the settings of one calibrated layer: ``observer`` on its output, min-max on its weight."""
        weight = PerChannelMinMaxObserver.with_args(
            dtype=torch.qint8,
            qscheme=torch.per_channel_symmetric,
            quant_min=-self.weight_max,
            quant_max=self.weight_max,
        )
        return QConfig(activation=maker(observer).with_args(**self._range), weight=weight)  # type: ignore[no-untyped-call]

    def fewer(self, bits: int) -> Target:
        """Return the same target with activations of fewer bits, and all their integers in use."""
        signed = self.activation_min < 0
        low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
        return dataclasses.replace(self, activation_min=low, activation_max=high)

    def observer(self, name: Observer) -> ObserverBase:
        """Return a new observer of activations."""
        made: ObserverBase = maker(name)(**self._range)
        return made

    @property
    def _range(self) -> dict[str, Any]:
        range_: dict[str, Any] = {"quant_min": self.activation_min, "quant_max": self.activation_max}
        if self.activation_min < 0:
            return range_ | {"dtype": torch.qint8, "qscheme": torch.per_tensor_symmetric}
        return range_ | {"dtype": torch.quint8}

    def quantization_aware(self, horizon: int) -> QConfigMapping:
        """Return the settings for FX ``prepare_qat_fx``: fake-quantize with moving-average observers.

        The newest batch has the weight 1/``horizon`` in an activation's running range.
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
            # Weights are known exactly. Their range is that of their current values, not an average over the past.
            averaging_constant=1.0,
        )
        qconfig = QConfig(activation=activation, weight=weight)  # type: ignore[no-untyped-call]
        return self._mapped(get_default_qat_qconfig_mapping("x86") if self.packed else QConfigMapping(), qconfig)

    def backend_config(self) -> BackendConfig:
        """Return the patterns that the backend's kernels fuse."""
        config = get_x86_backend_config() if self.packed else _tensorrt_backend_config()
        kind = torch.quint8 if self.packed else torch.qint8
        for layer in ZEROS:  # torch.ao (2.11 to 2.14) would compute them in float, and give them another scale
            pattern = BackendPatternConfig(layer).add_dtype_config(DTypeConfig(input_dtype=kind, output_dtype=kind))
            config.set_backend_pattern_config(
                pattern.set_observation_type(ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT)
            )
        return config

    def _mapped(self, mapping: QConfigMapping, qconfig: QConfig) -> QConfigMapping:
        # The default mapping has the special settings of some operators (fixed ranges of sigmoid and softmax,
        # per-tensor weights of transposed convolutions). Only the general case is replaced.
        mapping = mapping.set_global(qconfig)
        # A served dropout does nothing, and torch's packed form passes its input on. A range of its own would be
        # trained and exported (a second rounding and clipping) and then not be served. TensorRT's backend config
        # handles dropouts itself.
        for dropout in (*DROPOUTS, functional.dropout) if self.packed else ():
            mapping = mapping.set_object_type(dropout, default_reuse_input_qconfig)
        # Learned positions: torch.ao (2.14) quantizes no table with these settings, and integer training fails on a
        # table.
        for table in (torch.nn.Embedding, torch.nn.EmbeddingBag):
            mapping = mapping.set_object_type(table, None)
        # Torch's x86 kernels of these give other numbers than its reference form (2.14: 70 steps off, seen).
        for transposed in _TRANSPOSED:
            mapping = mapping.set_object_type(transposed, None)
        return mapping


def _tensorrt_backend_config() -> BackendConfig:
    """Return torch's config for TensorRT with additions: dropouts share their input's range, means have their own.

    torch.ao (2.11 to 2.14) makes means share the scale of their input. They use only a part of its range, right in
    front of the last layer. That costs 1 dB of the differences between images in a ResNet-20, and 10 dB in small
    networks. TensorRT quantizes a pool between a DequantizeLinear and a QuantizeLinear of another scale ("Explicit
    Quantization").
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


#: The target of this machine's CPU (auto), or one by name.
TargetName = Literal["auto", "x86-vnni", "x86", "tensorrt"]

#: The largest activation integer on CPUs.
_UNSIGNED_MAX = 255

#: TensorRT's integers are symmetric, those of activations −128 to 127 ("Working with Quantized Types" in its
#: documentation). Its parser reads opsets 9 to 24 (onnx-tensorrt, docs/operators.md of 10.15). From 21 on a Q/DQ may
#: have attributes that earlier releases of 10 do not know. Below 19 a scale in FP16 is not legal.
_TENSORRT_TARGET = Target(TENSORRT, activation_max=127, activation_min=-128, packed=False, opset=20)


def x86_target() -> Target:
    """Return the target of this machine's CPU.

    With VNNI, products of unsigned and signed bytes are summed in 32 bits, and the whole range is safe. Without it,
    fbgemm, oneDNN and ONNX Runtime add pairs in 16 bits. That saturates unless one of the two factors has 7 bits. Here
    weights have 7 bits, as in ONNX Runtime's and NNCF's quantizers. They have a scale for each channel, so they lose
    less than activations would (torch's ``reduce_range``). Narrow activations also need a clamp at every quantizer. On
    a ResNet-20 of CIFAR-10, 28 dB remain with 8 bits, 26 dB with 7-bit weights, and 23 to 24 dB with 7-bit activations.
    """
    return target_named(VNNI_X86 if has_vnni() else ANY_X86)


def target_named(name: TargetName) -> Target:
    """Return the target that a setting names. ``auto`` is this machine's."""
    if name == "auto":
        return x86_target()
    if name == TENSORRT:
        return _TENSORRT_TARGET
    return Target(name, _UNSIGNED_MAX, weight_max=127 if name == VNNI_X86 else WEIGHT_MAX)


def check_target(name: TargetName) -> None:
    """Refuse a target whose integers cannot be computed, and thus not be checked, on this machine.

    Raises:
        UserError: this CPU would saturate.
    """
    if name != "auto" and saturates(name) is not None:
        raise UserError(
            f"target: {name} cannot be built here: its answers must be checked, and this CPU has no VNNI and would "
            f"saturate; target: {ANY_X86} runs on every x86 CPU, with 7-bit weights"
        )
