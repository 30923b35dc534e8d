"""Commands in messages, spelled so that whoever reads them can run them where they are."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

#: The store that commands take where none is named.
DEFAULT_STORE = Path("model_store")


def command(words: str, store: Path = DEFAULT_STORE) -> str:
    """``serve start RUN`` as ``.venv/bin/python -m serve start RUN``, with the store if it is not the default."""
    option = "" if store == DEFAULT_STORE else f" --store {shlex.quote(str(store))}"
    return f"{_python()} -m {words}{option}"


def target(name: str, otherwise: str, store: Path = DEFAULT_STORE, **variables: str) -> str:
    """``make NAME VARIABLE=value`` for whoever came by make; the command ``otherwise`` for the others."""
    if "MAKELEVEL" not in os.environ:
        return command(otherwise, store)
    given = variables | ({} if store == DEFAULT_STORE else {"STORE": str(store)})
    return " ".join(["make", name, *(f"{key}={shlex.quote(value)}" for key, value in given.items())])


def _python() -> str:
    """This interpreter: ``python`` where that is the first on the path, else its path, relative if it lies here."""
    # Not resolved: the python of an environment is a link to one outside of it.
    own = Path(sys.executable).absolute()
    first = shutil.which("python")
    if first is not None and Path(first).absolute() == own:
        return "python"
    here = Path.cwd()
    return shlex.quote(str(own.relative_to(here) if own.is_relative_to(here) else own))
