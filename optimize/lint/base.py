"""The interface of a linter rule, and the registry of rules.

Each rule is a function of a module in ``optimize/lint/rules``.

A rule inspects the structure and the constants of a graph, and runs nothing. A graph without findings is no proof of
what a device does with it. Give your own graph to `lint`, and an untrusted file to `lint_file`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import onnx

from optimize.lint.acceptance import acceptance
from optimize.lint.graph import DOMAINS, Graph, label, printable
from optimize.lint.shapes import misfits
from optimize.lint.untrusted_files import read_graph, weight_bytes
from serve.runtime.errors import PipelineError, UserError, listed, message_of, one_line
from serve.runtime.registry import Registry, defined_at

#: The target of a graph. ``cpu``: ONNX Runtime and OpenVINO on a CPU with VNNI. ``x86``: any x86 CPU (weights or
#: activations of 7 bits, which 16-bit sums can hold). ``tensorrt``: TensorRT 10 or 11.
LintTarget = Literal["cpu", "x86", "tensorrt"]
TARGETS: tuple[LintTarget, ...] = get_args(LintTarget)
CPUS: tuple[LintTarget, ...] = ("cpu", "x86")
TENSORRT: tuple[LintTarget, ...] = ("tensorrt",)

#: Domains whose operators are part of ONNX Runtime (1.31), if it has them at all.
KNOWN_TO_ONNXRUNTIME = frozenset(
    {*DOMAINS, "ai.onnx.ml", "ai.onnx.training", "ai.onnx.preview.training", "ai.onnx.preview", "com.microsoft.nchwc"}
)

#: ``error``: the target refuses the graph or computes something else than was meant. ``warning``: it is slower, larger
#: or less exact than necessary.
Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Fault:
    """A rule's result at one node: what is wrong there, and what would be right."""

    node: str
    said: str
    remedy: str


@dataclass(frozen=True)
class Finding:
    """A fault, with the rule that found it."""

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
        name: its name in findings.
        severity: how bad a fault is.
        targets: the targets whose graphs it judges.
        check: finds the faults of a graph. Its docstring says what is right, and gives the source.
    """

    name: str
    severity: Severity
    targets: tuple[LintTarget, ...]
    check: Check


_REGISTRY: Registry[Rule] = Registry("rule", package="optimize.lint.rules", group="optimize.lint.rules")


def rule(name: str, severity: Severity, targets: tuple[LintTarget, ...] = TARGETS) -> Callable[[Check], Check]:
    """Register the decorated function as a rule."""

    def registered(check: Check) -> Check:
        _REGISTRY.register(Rule(name, severity, targets, check), defined_at(check))
        return check

    return registered


def rules() -> dict[str, Rule]:
    """Return all rules by name."""
    return _REGISTRY.all()


@dataclass(frozen=True)
class Unjudged:
    """A part of a graph that the linter did not judge, and why.

    ``failed`` means that it should have been judged: a rule failed, or ONNX Runtime gave no answer. Otherwise no rule
    covers it.
    """

    what: str
    why: str
    failed: bool


@dataclass(frozen=True)
class Verdict:
    """The linter's result for a graph.

    Attributes:
        findings: errors first.
        unjudged: parts that the findings do not cover.
        refused: why the graph is not well-formed: sizes that do not fit, or why ONNX Runtime does not open it. Only
            checked for a file.
    """

    findings: tuple[Finding, ...]
    unjudged: tuple[Unjudged, ...]
    refused: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether the graph is valid, and everything was judged that the linter should judge."""
        return not self.refused and not self.failures

    @property
    def failures(self) -> tuple[Unjudged, ...]:
        """The parts that should have been judged and were not."""
        return tuple(entry for entry in self.unjudged if entry.failed)

    def to_json(self) -> dict[str, Any]:
        """Return values for ``json.dumps``. ``not_judged`` lists the parts that the findings do not cover."""
        return {
            "findings": [asdict(finding) for finding in self.findings],
            "not_judged": [asdict(entry) for entry in self.unjudged],
            "refused": list(self.refused),
        }


def lint(model: onnx.ModelProto, target: LintTarget) -> tuple[Finding, ...]:
    """Return the findings of a quantized graph, errors first.

    Args:
        model: with its initializers. Only nodes of the main graph are judged, not those of inner graphs.
        target: the target of the graph.

    Raises:
        UserError: the graph cannot be read, or a rule failed on it. The message names the tensor or node.
    """
    verdict = judge(model, target)
    for entry in verdict.failures:
        raise UserError(f"{entry.what} cannot be checked: {entry.why}")
    return verdict.findings


def lint_file(path: Path, target: LintTarget) -> Verdict:
    """Judge an untrusted quantized ONNX file with the rules, onnx and ONNX Runtime.

    Raises:
        UserError: it cannot be read, or is no valid ONNX graph.
    """
    model = read_graph(path)
    foreign = {node.domain for node in _all_nodes(model)} - {*KNOWN_TO_ONNXRUNTIME, *_local_domains(model)}
    accepted = acceptance(path, weight_bytes(path, model), frozenset(map(printable, foreign)))
    known = {value.name for value in (*model.graph.input, *model.graph.value_info)}
    for name, sizes in accepted.shapes.items():
        if name not in known:
            model.graph.value_info.append(onnx.helper.make_tensor_value_info(name, 0, sizes))
    try:
        verdict, graph = judge(model, target), _read(model)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    refused, unjudged = list[str](), list(verdict.unjudged)
    try:
        refused += misfits(graph)
    except Exception as error:  # noqa: BLE001 - like a rule's error: the graph is untrusted
        unjudged.append(_failed("whether sizes fit each other", graph, error))
    no_kernel = target == "tensorrt" and (accepted.refused or "").startswith("NotImplemented")
    if accepted.refused is not None and not no_kernel:
        refused.append(printable(f"ONNX Runtime cannot open it: {accepted.refused}"))
    # TensorRT may have kernels that ONNX Runtime does not have on a CPU.
    if (why := accepted.refused if no_kernel else accepted.unjudged) is not None:
        unjudged.append(Unjudged("whether ONNX Runtime opens the graph", printable(why), failed=True))
    return Verdict(verdict.findings, tuple(unjudged), tuple(refused))


def judge(model: onnx.ModelProto, target: LintTarget) -> Verdict:
    """Apply the rules for a target. If one fails, the others still run.

    Raises:
        UserError: the graph cannot be read.
    """
    findings = list[Finding]()
    with np.errstate(all="ignore"):  # NaN among scales is a finding, not a warning
        graph = _read(model)
        unjudged = list(_out_of_sight(model, graph))
        for entry in rules().values():
            if target not in entry.targets:
                continue
            graph.visited = None
            try:
                for fault in entry.check(graph, target):
                    texts = map(printable, (fault.node, fault.said, fault.remedy))
                    findings.append(Finding(entry.name, entry.severity, *texts))
            except Exception as error:  # noqa: BLE001 - a rule may be third-party code, and the graph is untrusted
                unjudged.append(_failed(f"the rule {entry.name!r}", graph, error))
    return Verdict(tuple(sorted(findings, key=lambda finding: (finding.severity, finding.rule))), tuple(unjudged))


def _failed(what: str, graph: Graph, error: Exception) -> Unjudged:
    where = "" if graph.visited is None else f", at {label(graph.visited)}"
    return Unjudged(f"{what}{where}", printable(message_of(error)), failed=True)


def _read(model: onnx.ModelProto) -> Graph:
    try:
        return Graph(model)
    except PipelineError:
        raise
    except Exception as error:
        raise UserError(f"the graph cannot be read ({printable(one_line(error))})") from error


def _out_of_sight(model: onnx.ModelProto, graph: Graph) -> Iterator[Unjudged]:
    """Yield the parts that no rule covers."""
    foreign = {node.op_type for node in graph.nodes if node.domain not in DOMAINS}
    if foreign:
        yield Unjudged(_listed("operators", foreign), "the rules know only ONNX and com.microsoft", failed=False)
    inner = {label(node) for node in graph.nodes if any(_inner(node))}
    if inner:
        yield Unjudged(
            _listed("the graphs within", inner), "the rules check only the nodes of the main graph", failed=False
        )
    if model.functions:
        names = {f"{function.domain}.{function.name}" for function in model.functions}
        yield Unjudged(_listed("the bodies of functions", names), "the rules check only the main graph", failed=False)
    if sparse := {tensor.values.name for tensor in model.graph.sparse_initializer}:
        yield Unjudged(_listed("sparse tensors", sparse), "the rules read only dense ones", failed=False)


def _listed(what: str, names: set[str], most: int = 5) -> str:
    return f"{what} {listed(map(printable, sorted(names)), most)}"


def _inner(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for entry in node.attribute:
        if entry.HasField("g"):
            yield entry.g
        yield from entry.graphs


def _all_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of the graph, of its inner graphs, and of its functions."""
    waiting = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [below for inner in _inner(node) for below in inner.node]


def _local_domains(model: onnx.ModelProto) -> set[str]:
    """Return the domains whose operators in the file are all functions of the file."""
    own = {(function.domain, function.name) for function in model.functions}
    called = {(node.domain, node.op_type) for node in _all_nodes(model)}
    return {domain for domain, _ in own} - {domain for domain, name in called if (domain, name) not in own}
