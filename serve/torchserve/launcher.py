"""The project's main for TorchServe: Groovy sources, compiled once for each user by the Groovy in TorchServe's jar.

Compiling takes half of Java's CPU time at a start, so the result is cached (`compile_cache.kept`).
"""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from serve.runtime.card.card import sha256_file
from serve.runtime.errors import EngineError
from serve.runtime.model_files.compile_cache import cache_folder, kept

#: Folder of the sources and the configuration of the logs.
FRONTEND = Path(__file__).parent / "frontend"

#: Java class that runs a Groovy file.
GROOVY = "groovy.ui.GroovyMain"

_MAIN = "Launch"
_JAR = "launch.jar"
_COMPILER = "org.codehaus.groovy.tools.FileSystemCompiler"
_COMPILE_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Launcher:
    """What Java runs: the class path beside TorchServe's jar, and the words of the command line."""

    classes: Path
    words: tuple[str, ...]


def launcher(java: Path) -> Launcher:
    """Return the compiled main. If nothing can be cached, return its source, which each start compiles.

    Args:
        java: the executable.
    """
    try:
        return Launcher(_compiled(java), (_MAIN,))
    except (EngineError, OSError, subprocess.SubprocessError):  # no folder, no space, or a Java that cannot compile
        return Launcher(FRONTEND, (GROOVY, str(FRONTEND / f"{_MAIN}.groovy")))


def torchserve_jar() -> Path:
    """Return TorchServe's frontend jar, which includes its dependencies."""
    from ts import __file__ as torchserve

    return Path(torchserve).parent / "frontend" / "model-server.jar"


def _compiled(java: Path) -> Path:
    sources, jar = sorted(FRONTEND.glob("*.groovy")), torchserve_jar()
    key = {
        "sources": {source.name: sha256_file(source) for source in sources},
        "torchserve": sha256_file(jar),
        "java": hashlib.sha256((java.parent.parent / "release").read_bytes()).hexdigest(),
    }

    def make(path: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            words = [str(java), "-XX:TieredStopAtLevel=1", "-cp", str(jar), _COMPILER, "-d", folder]
            subprocess.run([*words, *map(str, sources)], check=True, capture_output=True, timeout=_COMPILE_TIMEOUT_S)
            with zipfile.ZipFile(path, "w") as archive:
                for found in sorted(Path(folder).iterdir()):
                    archive.write(found, found.name)

    return kept(cache_folder("torchserve", key), _JAR, make)
