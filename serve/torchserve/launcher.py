"""Our main of TorchServe, ready to be run: text that the Groovy in TorchServe's own jar compiles, once for each user.

Compiling takes half of the CPU time that Java takes to start, so that what comes of it is kept (`compile_cache.kept`).
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

#: Holds the sources, and the configuration of the logs.
FRONTEND = Path(__file__).parent / "frontend"

#: Runs a file of Groovy.
GROOVY = "groovy.ui.GroovyMain"

_MAIN = "Launch"
_JAR = "launch.jar"
_COMPILER = "org.codehaus.groovy.tools.FileSystemCompiler"
_COMPILED_S = 120.0


@dataclass(frozen=True)
class Launcher:
    """What Java is to run: where that lies beside TorchServe's jar, and the words that name it."""

    classes: Path
    words: tuple[str, ...]


def launcher(java: Path) -> Launcher:
    """Our main, compiled before or now; where nothing can be kept, its text, which each start compiles for itself.

    Args:
        java: the executable.
    """
    try:
        return Launcher(_compiled(java), (_MAIN,))
    except (EngineError, OSError, subprocess.SubprocessError):  # no place, no room, or a Java that cannot do it
        return Launcher(FRONTEND, (GROOVY, str(FRONTEND / f"{_MAIN}.groovy")))


def torchserve_jar() -> Path:
    """TorchServe's frontend, with all that it needs."""
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
            subprocess.run([*words, *map(str, sources)], check=True, capture_output=True, timeout=_COMPILED_S)
            with zipfile.ZipFile(path, "w") as archive:
                for found in sorted(Path(folder).iterdir()):
                    archive.write(found, found.name)

    return kept(cache_folder("torchserve", key), _JAR, make)
