"""What a rule of the linter is, and the registry of them: each is a function of a module in ``optimize/lint/rules``.

A rule looks at the structure and the constants of a graph, and runs nothing. What a device does with a graph that has
no finding is not proven by that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import onnx
from google.protobuf.message import DecodeError

from optimize.lint.graph import Graph
from serve.runtime.errors import UserError, one_line
from serve.runtime.registry import Registry

#: What a graph is for: ``cpu``, ONNX Runtime and OpenVINO on a CPU with VNNI; ``x86``, on any x86 CPU (weights or
#: activations of 7 bits, which 16-bit sums hold); ``tensorrt``, TensorRT 10 or 11.
LintTarget = Literal["cpu", "x86", "tensorrt"]
TARGETS: tuple[LintTarget, ...] = get_args(LintTarget)
CPUS: tuple[LintTarget, ...] = ("cpu", "x86")
TENSORRT: tuple[LintTarget, ...] = ("tensorrt",)

#: ``error``: the target refuses the graph or computes something else than was meant; ``warning``: it is slower, larger
#: or less exact than it need be.
Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Fault:
    """What a rule found at one node: what is wrong there, and what would be right."""

    node: str
    said: str
    remedy: str


@dataclass(frozen=True)
class Finding:
    """A fault with the rule that found it."""

    rule: str
    severity: Severity
    node: str
    said: str
    remedy: str


Check = Callable[[Graph, LintTarget], Iterator[Fault]]


@dataclass(frozen=True)
class Rule:
    """One registered rule.

    Attributes:
        name: the word for it in findings.
        severity: how bad it is.
        targets: whose graphs it judges.
        check: finds the faults of a graph; its docstring says what is right, and where that is written.
    """

    name: str
    severity: Severity
    targets: tuple[LintTarget, ...]
    check: Check


_REGISTRY: Registry[Rule] = Registry("rule", package="optimize.lint.rules", group="optimize.lint.rules")


def rule(name: str, severity: Severity, targets: tuple[LintTarget, ...] = TARGETS) -> Callable[[Check], Check]:
    """Register the decorated function as a rule."""

    def registered(check: Check) -> Check:
        _REGISTRY.register(Rule(name, severity, targets, check))
        return check

    return registered


def rules() -> dict[str, Rule]:
    """All rules by name."""
    return _REGISTRY.all()


def lint(model: onnx.ModelProto, target: LintTarget) -> tuple[Finding, ...]:
    """What is wrong with a quantized graph, errors first.

    Args:
        model: with its initializers; of its graph the nodes at the top are judged, and not those within others.
        target: what it is for.

    Raises:
        UserError: a tensor that a rule asks for cannot be read.
    """
    graph = Graph(model)
    found = [
        Finding(entry.name, entry.severity, fault.node, fault.said, fault.remedy)
        for entry in rules().values()
        if target in entry.targets
        for fault in entry.check(graph, target)
    ]
    return tuple(sorted(found, key=lambda finding: (finding.severity, finding.rule)))


def read_graph(path: Path) -> onnx.ModelProto:
    """Read an ONNX file, with its weights.

    Raises:
        UserError: it cannot be read, or is no valid ONNX graph.
    """
    try:
        model = onnx.load(path)
        onnx.checker.check_model(model)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or one_line(error)}") from None
    except (DecodeError, onnx.checker.ValidationError, ValueError, RuntimeError) as error:
        raise UserError(f"{path}: not a valid ONNX graph ({one_line(error)})") from None
    if not model.graph.node:
        raise UserError(f"{path}: not a valid ONNX graph (it has no nodes)")
    return model
