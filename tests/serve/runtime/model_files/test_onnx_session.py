"""Where ONNX Runtime runs a graph is told by what it recorded, and a fallback is an error."""

from __future__ import annotations

import ctypes.util
import dataclasses
import importlib.util
from collections import Counter
from pathlib import Path

import pytest
import torch

from serve.runtime.card.card import load_card
from serve.runtime.engines.base import executions_for, find_engine
from serve.runtime.engines.onnxruntime_tensorrt import input_name, precision_options, profile, tensorrt_version
from serve.runtime.errors import EngineError
from serve.runtime.model_files.onnx_file import TINY_GRAPH
from serve.runtime.model_files.onnx_session import (
    CPU_PROVIDER,
    assignment,
    check_assignment,
    gpu_session,
    make_session,
    run_tiny,
)
from tests.serve import artifacts

CUDA = "CUDAExecutionProvider"
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifacts.onnx(tmp_path_factory.mktemp("graph") / "onnx")


def test_a_session_records_which_provider_took_which_node(folder: Path) -> None:
    entries = {"session.record_ep_graph_assignment_info": "1"}
    session = make_session(str(folder / "model.onnx"), [(CPU_PROVIDER, {})], entries=entries)
    found = assignment(session)
    assert set(found) == {CPU_PROVIDER}
    assert found[CPU_PROVIDER]["Conv"] == 2
    assert found[CPU_PROVIDER]["Gemm"] == 1
    check_assignment(found, CPU_PROVIDER)
    with pytest.raises(EngineError, match=f"{CUDA} cannot run this whole graph: {CPU_PROVIDER} took Conv, "):
        check_assignment(found, CUDA)


@pytest.mark.parametrize(
    ("elsewhere", "said"),
    [
        ({CPU_PROVIDER: Counter(["Softmax"])}, "CPUExecutionProvider took Softmax"),
        ({CPU_PROVIDER: Counter(["Shape", "Softmax"])}, "took Softmax"),
        # Pixels that are converted on the CPU, and not a shape.
        ({CPU_PROVIDER: Counter(["Cast", "Mul"])}, "took Cast, Mul"),
        ({"OtherExecutionProvider": Counter(["Shape"])}, "OtherExecutionProvider took Shape"),
        ({CPU_PROVIDER: Counter(["Shape", "Gather", "Concat"])}, None),
        ({}, None),
    ],
)
def test_only_arithmetic_on_shapes_may_run_elsewhere(elsewhere: dict[str, Counter[str]], said: str | None) -> None:
    found = {CUDA: Counter(["Conv", "Reshape"]), **elsewhere}
    if said is None:
        check_assignment(found, CUDA)
    else:
        with pytest.raises(EngineError, match=said):
            check_assignment(found, CUDA)


def test_a_provider_that_took_nothing_does_not_run_the_network() -> None:
    with pytest.raises(EngineError, match="it took no node"):
        check_assignment({CPU_PROVIDER: Counter(["Shape"])}, CUDA)


def test_the_tiny_graph_is_run_and_its_answer_looked_at(folder: Path) -> None:
    run_tiny(make_session(TINY_GRAPH, [(CPU_PROVIDER, {})]))


@without_cuda
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("provider", [CUDA, "TensorrtExecutionProvider"])
def test_a_provider_that_cannot_start_is_an_error_and_no_session_on_the_cpu(provider: str, whole: bool) -> None:
    with pytest.raises(EngineError, match=f"does not run this on {provider} .* install the libraries that it needs"):
        gpu_session(TINY_GRAPH, provider, {"device_id": 0}, whole=whole)


@without_cuda
@pytest.mark.parametrize("engine", ["torch-cudagraph", "onnxruntime-cuda", "onnxruntime-tensorrt"])
def test_a_probe_of_a_gpu_engine_fails_where_there_is_none(engine: str) -> None:
    # torch raises AssertionError where it was built without CUDA.
    with pytest.raises((EngineError, RuntimeError, AssertionError)):
        find_engine(engine).probe(torch.device("cuda"))


@pytest.mark.parametrize("precision", ["int8", "int8 (weights and activations)"])
def test_int8_graphs_are_refused_by_gpu_engines_that_are_not_made_for_them(
    precision: str, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "int8").mkdir()
    (tmp_path / "int8" / "model.onnx").write_bytes((folder / "model.onnx").read_bytes())
    card = load_card(artifacts.write_artifact(tmp_path / "int8", "int8", "onnx", "model.onnx", precision=precision))
    for engine, reason in (
        ("onnxruntime-cuda", "has no INT8"),
        ("onnxruntime-tensorrt", "was not made for TensorRT"),
    ):
        assert reason in str(find_engine(engine).refuses(card, "cuda"))
    assert executions_for(card, "cuda") == []
    float_card = load_card(folder)
    assert [execution.engine for execution in executions_for(float_card, "cuda")] == [
        "onnxruntime-tensorrt",
        "onnxruntime-cuda",
    ]


@pytest.mark.parametrize(("target", "reason"), [("x86", "built for tensorrt, not for x86"), ("tensorrt", None)])
def test_tensorrt_takes_the_integers_that_were_made_for_it(target: str, reason: str | None, folder: Path) -> None:
    card = dataclasses.replace(load_card(folder), precision="int8", target=target)
    found = find_engine("onnxruntime-tensorrt").refuses(card, "cuda")
    assert found is None if reason is None else reason in str(found)
    for other in ("onnxruntime-cuda", "onnxruntime", "openvino"):
        device = "cuda" if other == "onnxruntime-cuda" else "cpu"
        assert (find_engine(other).refuses(card, device) is None) == (target == "x86" and device == "cpu")


def test_tensorrt_gets_one_profile_for_every_batch_up_to_the_largest(folder: Path) -> None:
    assert profile(input_name(folder / "model.onnx"), (3, 32, 32), 8, 64) == {
        "trt_profile_min_shapes": "input:1x3x32x32",
        "trt_profile_opt_shapes": "input:8x3x32x32",
        "trt_profile_max_shapes": "input:64x3x32x32",
    }


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("float32", {}),
        ("float16", {"trt_fp16_enable": True}),
        ("bfloat16", {"trt_bf16_enable": True}),
        ("int8", {"trt_int8_enable": True}),
    ],
)
def test_tensorrt_may_use_the_arithmetic_that_the_card_names(precision: str, options: dict[str, bool]) -> None:
    assert precision_options(precision) == options
    half = {"trt_fp16_enable": True} if precision == "int8" else {}
    assert precision_options(precision, half=True) == options | half


@pytest.mark.skipif(ctypes.util.find_library("nvinfer") is not None, reason="TensorRT is installed")
@pytest.mark.skipif(importlib.util.find_spec("tensorrt_libs") is not None, reason="TensorRT is installed")
def test_where_tensorrt_is_missing_its_library_is_named() -> None:
    with pytest.raises(EngineError, match=r"libnvinfer.so.10 or libnvinfer.so.11 cannot be loaded"):
        tensorrt_version()
