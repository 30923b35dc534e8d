"""The linter on graphs of other tools: ONNX Runtime's own quantizer, and NNCF."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from optimize.lint.base import Finding, lint


def residual(*, norm: bool = False) -> onnx.ModelProto:
    """``input`` → Conv (→ BatchNormalization) → Relu → Conv → + shortcut → Relu → GlobalAveragePool → ``logits``."""
    rng = np.random.default_rng(0)
    tensors = {f"{name}_w": rng.normal(size=(4, 4, 3, 3)).astype(np.float32) for name in ("first", "second")}
    tensors |= {f"{name}_b": rng.normal(size=4).astype(np.float32) for name in ("first", "second")}
    tensors |= {name: np.full(4, 1.5, np.float32) for name in ("gamma", "beta", "mean", "var") if norm}
    nodes = [helper.make_node("Conv", ["input", "first_w", "first_b"], ["first"], "first", pads=[1] * 4)]
    if norm:
        nodes.append(
            helper.make_node("BatchNormalization", ["first", "gamma", "beta", "mean", "var"], ["normed"], "norm")
        )
    nodes += [
        helper.make_node("Relu", ["normed" if norm else "first"], ["relu"], "relu"),
        helper.make_node("Conv", ["relu", "second_w", "second_b"], ["second"], "second", pads=[1] * 4),
        helper.make_node("Add", ["second", "relu"], ["sum"], "sum"),
        helper.make_node("Relu", ["sum"], ["last"], "last"),
        helper.make_node("GlobalAveragePool", ["last"], ["logits"], "pool"),
    ]
    model = helper.make_model(
        helper.make_graph(
            nodes,
            "residual",
            [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", 4, 8, 8])],
            [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 4, 1, 1])],
            [numpy_helper.from_array(value, name) for name, value in tensors.items()],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=9,
    )
    onnx.checker.check_model(model)
    return model


def images() -> Iterator[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    yield from ({"input": rng.normal(size=(2, 4, 8, 8)).astype(np.float32)} for _ in range(4))


def in_onnxruntime(folder: Path, model: onnx.ModelProto, **options: object) -> onnx.ModelProto:
    from onnxruntime.quantization import CalibrationDataReader, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._left = images()

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self._left, None)

    onnx.save(model, str(folder / "float.onnx"))
    quantize_static(str(folder / "float.onnx"), str(folder / "int8.onnx"), Reader(), **options)
    return onnx.load(folder / "int8.onnx")


def counted(findings: tuple[Finding, ...], severity: str) -> set[str]:
    return {finding.rule for finding in findings if finding.severity == severity}


def test_onnx_runtimes_quantizer_makes_what_its_cpu_wants_and_not_what_tensorrt_takes(tmp_path: Path) -> None:
    from onnxruntime.quantization import QuantType

    model = in_onnxruntime(tmp_path, residual(), activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8)
    assert lint(model, "cpu") == ()
    assert counted(lint(model, "tensorrt"), "error") == {"int32-bias", "integer-type", "zero-point"}
    saturating = [finding for finding in lint(model, "x86") if finding.rule == "saturating-sums"]
    assert len(saturating) == 2, "two convolutions"
    model = in_onnxruntime(
        tmp_path, residual(), activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8, reduce_range=True
    )
    assert lint(model, "x86") == ()


def test_with_the_options_for_it_onnx_runtimes_quantizer_makes_what_tensorrt_takes(tmp_path: Path) -> None:
    from onnxruntime.quantization import QuantType

    model = in_onnxruntime(
        tmp_path,
        residual(),
        activation_type=QuantType.QInt8,
        weight_type=QuantType.QInt8,
        per_channel=True,
        extra_options={"ActivationSymmetric": True, "WeightSymmetric": True, "QuantizeBias": False},
    )
    assert counted(lint(model, "tensorrt"), "error") == set()
    assert counted(lint(model, "cpu"), "warning") == {"slow-integers"}


def test_in_the_operator_format_tensorrt_reads_nothing(tmp_path: Path) -> None:
    from onnxruntime.quantization import QuantFormat

    model = in_onnxruntime(tmp_path, residual(), quant_format=QuantFormat.QOperator)
    names = [finding.said for finding in lint(model, "tensorrt") if finding.rule == "operator"]
    assert "TensorRT's parser has no QLinearConv" in names
    assert counted(lint(model, "cpu"), "error") == set()


def test_a_norm_that_was_left_out_of_its_convolution_is_named(tmp_path: Path) -> None:
    found = lint(in_onnxruntime(tmp_path, residual(norm=True)), "cpu")
    assert [finding.node for finding in found if finding.rule == "unfused-batchnorm"] == ["norm"]


@pytest.mark.peers
def test_nncfs_graph_mixes_signed_and_unsigned_activations() -> None:
    nncf = pytest.importorskip("nncf")
    model = nncf.quantize(residual(), nncf.Dataset(list(images())), subset_size=4)
    assert [(finding.rule, finding.node) for finding in lint(model, "cpu")] == [("slow-integers", "first")]
    assert {finding.rule for finding in lint(model, "tensorrt")} == {"integer-type"}, "what a Relu gives is uint8"
