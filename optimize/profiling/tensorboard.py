"""Profiles as TensorBoard's graph: layers as nodes, coloured by their time. Needs the extra ``tensorboard``."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from pathlib import Path
from typing import Any, Final

from optimize.profiling.profile_records import Profile, Profiled
from optimize.training.tensorboard_events import tensorboard
from serve.runtime.errors import UserError

#: Characters that the name of a TensorFlow graph node must not have (tensorflow/core/framework/node_def_util.cc).
_ILLEGAL: Final = re.compile(r"[^A-Za-z0-9_./\-]")

_DEVICE: Final = "/device:CPU:0"


def write_graphs(found: Profiled, folder: Path) -> list[Path]:
    """Write an event file for each execution, ``folder/<execution>/``, which TensorBoard shows under *Graphs*.

    A node has its layer's kind, precision, MACs and bytes as attributes. The choice *Compute time* colours by time.

    Raises:
        UserError: tensorboard is not installed, or the folder cannot be written.
    """
    writers = tensorboard("a graph")
    written = []
    for one in found.profiles:
        target = folder / _ILLEGAL.sub("-", one.runs_on)
        graph, steps = _graph(one)
        try:
            writer = writers.FileWriter(str(target))
            writer.add_graph((graph, steps))
            writer.close()
        except OSError as error:
            raise UserError(f"{target} cannot be written: {error.strerror}") from None
        written.append(target)
    return written


def _graph(one: Profile) -> tuple[Any, Any]:
    """Return a ``GraphDef`` and a ``RunMetadata`` with the time of each node, microseconds."""
    graph = _proto("graph_pb2.GraphDef", versions=_proto("versions_pb2.VersionDef", producer=22))
    stats = _proto("step_stats_pb2.DeviceStepStats", device=_DEVICE)
    count: Counter[str] = Counter()
    last: dict[str, str] = {}
    began = 0.0
    for layer in one.layers:
        name = _ILLEGAL.sub("_", layer.name.replace(".", "/")) or "layer"
        count[name] += 1
        name = f"{name}_{count[name]}" if count[name] > 1 else name
        node = graph.node.add(name=name, op=layer.kind, device=_DEVICE)
        node.input.extend(dict.fromkeys(last[before] for before in layer.after if before in last))
        for key in ("macs", "weights", "read", "written"):
            if (value := getattr(layer, key)) is not None:
                node.attr[key].i = value
        if layer.precision:
            node.attr["precision"].s = layer.precision.encode()
        last[layer.name] = name
        start = layer.start_ms if layer.start_ms is not None else began
        began = start + layer.ms
        stats.node_stats.add(
            node_name=name, all_start_micros=round(start * 1e3), all_end_rel_micros=max(1, round(layer.ms * 1e3))
        )
    steps = _proto("step_stats_pb2.StepStats", dev_stats=[stats])
    return graph, _proto("config_pb2.RunMetadata", step_stats=steps)


def _proto(name: str, **fields: Any) -> Any:
    """Make one of the TensorFlow messages that tensorboard contains."""
    module, _, message = name.partition(".")
    return getattr(importlib.import_module(f"tensorboard.compat.proto.{module}"), message)(**fields)
