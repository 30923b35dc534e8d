"""The settings for fewer bits: how many, by which method, and what stays int8."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from pydantic import Field, field_validator, model_validator
from torch import fx, nn

from optimize.errors import NotApplicableError
from optimize.quantization.choices import Choices, Chosen, Override, covered, named, of_activations
from optimize.quantization.lowbit.inputs import ActivationQuantizerName
from optimize.quantization.lowbit.weights import WeightQuantizerName
from optimize.quantization.ranges import Granularity

_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
_BINARY = ("xnor", "balanced")
_TERNARY = ("twn", "ttq")


class LowBits(Choices):
    """The settings that ``ptq-lowbit`` and ``qat-lowbit`` share. 8 bits are int8, as in ``ptq``."""

    weight_bits: int = Field(
        default=4,
        ge=1,
        le=8,
        description="bits of the weights of convolutions and linear layers; 1 means -1 and 1, 8 means int8",
    )
    activation_bits: int = Field(
        default=4,
        ge=1,
        le=8,
        description="bits of the inputs of those layers (8 means int8); shortcuts, sums and pools stay int8",
    )
    ends_int8: bool = Field(default=True, description="whether the first and the last layer stay int8")
    keep_int8: tuple[str, ...] = Field(
        default=(), description="other modules whose layers stay int8, as patterns like those of keep_float"
    )

    @model_validator(mode="after")
    def _fewer_somewhere(self) -> LowBits:
        if self.weight_bits == self.activation_bits == 8:
            raise ValueError("weight_bits and activation_bits are both 8, which is int8: use ptq or qat for that")
        return self

    def patterns(self) -> Mapping[str, Iterable[str]]:
        """See `Choices`."""
        return {**super().patterns(), "keep_int8": self.keep_int8}

    @property
    def label(self) -> str:
        """Its bits as a word, such as ``W4A4``."""
        return f"W{self.weight_bits}A{self.activation_bits}"


class LowBitTraining(LowBits):
    """The further settings of ``qat-lowbit``: methods."""

    weight_quantizer: WeightQuantizerName = Field(
        default_factory=lambda others: "xnor" if others.get("weight_bits") == 1 else "lsq",
        description="lsq (learned step) or dorefa for 2 to 7 bits; twn or ttq (ternary) for weight_bits 2, xnor or "
        "balanced (IR-Net) for 1 bit. ttq learns a scale for each sign and is stored as int8. Default: "
        "lsq, or xnor for 1 bit",
    )
    activation_quantizer: ActivationQuantizerName = Field(
        default="lsq", description="lsq (learned step), pact (learned bound) or dorefa (calibrated bound)"
    )
    weights: Granularity = Field(
        default="per-channel", description="scales of a layer's weight: one per output channel, or one for all"
    )

    @field_validator("overrides")
    @classmethod
    def _of_activations(cls, overrides: dict[str, Override]) -> dict[str, Override]:
        of_activations(overrides, "qat-lowbit trains all layers with one weight_quantizer")
        return overrides

    @model_validator(mode="after")
    def _of_its_bits(self) -> LowBitTraining:
        name, bits = self.weight_quantizer, self.weight_bits
        needed = 1 if name in _BINARY else 2 if name in _TERNARY else None
        if bits == 8 and name != "lsq":
            raise ValueError(f"weight_quantizer {name} is for fewer than 8 bits, which are int8 (weight_bits is 8)")
        if self.activation_bits == 8 and self.activation_quantizer != "lsq":
            raise ValueError(
                f"activation_quantizer {self.activation_quantizer} is for fewer than 8 bits, which are int8 "
                "(activation_bits is 8)"
            )
        if needed is not None and bits != needed:
            raise ValueError(f"weight_quantizer {name} is for weight_bits {needed} (they are {bits})")
        if bits == 1 and needed is None:
            raise ValueError(f"weight_quantizer {name} needs weight_bits 2 to 7; for 1 bit use xnor or balanced")
        return self

    @property
    def label(self) -> str:
        """See `LowBits`."""
        return f"ternary A{self.activation_bits}" if self.weight_quantizer in _TERNARY else super().label


def low_layers(
    traced: fx.GraphModule, chosen: Chosen, config: LowBits, build: Callable[[], nn.Module]
) -> tuple[str, ...]:
    """Return the names of the layers that get fewer bits, in the graph's order.

    Args:
        traced: see `trace_calls`.
        chosen: the layers in float.
        config: what stays int8.
        build: makes the model with its original names, for the patterns.

    Raises:
        NotApplicableError: there are none.
    """
    nodes = [node for node in traced.graph.nodes if node.op == "call_module"]
    layers = [str(node.target) for node in nodes if type(traced.get_submodule(str(node.target))) in _LAYERS]
    ends = {layers[0], layers[-1]} if config.ends_int8 and layers else set()
    kept = named(build, config.keep_int8)
    found = [name for name in layers if name not in ends and not covered(name, kept) and not chosen.in_float(name)]
    if not found:
        raise NotApplicableError(
            "all convolutions and linear layers of this model stay int8 or in float"
            + (" (its first and last do: ends_int8)" if ends else "")
        )
    return tuple(found)
