"""Where things lie in a store, and what a run is called: said once, for those who write it and those who serve it.

``<store>/<run>/`` has ``run.json`` (which model and data it is of), ``report.json``, ``report.html``, ``pareto.svg``,
``objects.json`` (what of the store it needs), ``artifacts/<name>/`` (``card.json``, the files that it names,
``serving.json``, ``known.json``, ``measurements.json``), ``archives/<run>-<name>.mar`` (with ``….mar.cdx.json``, and
``….mar.sig`` if it is signed), ``sample.<ext>``, and ``files.json``: the sealed list of all of these
(`serve.runs.sealed_files`). What commands find of it lies beside it, in ``<store>/<run>.search/`` and the like.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

#: The data that is taken where none is named; a run's name does not mention it.
PLAIN_DATA = "digits"

ARTIFACTS = "artifacts"
ARCHIVES = "archives"
REPORT_FILE = "report.json"
PAGE_FILE = "report.html"
PLOT_FILE = "pareto.svg"
OBJECTS_FILE = "objects.json"
IDENTITY_FILE = "run.json"
#: The sealed list of a run's files.
SEAL_FILE = "files.json"
#: Where exports are written that are told no other place.
EXPORTS = "export"
#: How the file with the traceback of a failed stage ends.
ERROR_ENDING = "-error.txt"
#: What a tuning keeps beside an artifact's card while it lasts: what it has measured, and its server's process.
JOURNAL_FILE = "tuning.journal"
SERVER_FILE = "tuning.server"
TUNING_STATE = (JOURNAL_FILE, SERVER_FILE)
#: What lies beside an archive, by its ending: who vouches for it, and what it consists of.
SIGNATURE_ENDING = ".sig"
SBOM_ENDING = ".cdx.json"
#: What folders beside a run's are called behind its name, by the command that writes into them; no run is called so.
PROFILE_ENDING = ".profile"
SEARCH_ENDING = ".search"
SENSITIVITY_ENDING = ".sensitivity"
FOUND_ENDINGS = (PROFILE_ENDING, SEARCH_ENDING, SENSITIVITY_ENDING)
LOCKS = Path(".store", "locks")

_ILLEGAL = re.compile(r"[^A-Za-z0-9_.-]+")
_LONGEST = 64  # characters of a name that is made of what a user wrote


def run_name(model: str, data: str = PLAIN_DATA) -> str:
    """What the run of a model on some data is called where nobody has named it.

    ``resnet18`` is ``resnet18``; ``path/to/net.py:build`` and ``package.net:build`` are ``net-build``, and
    ``timm:resnet18`` is ``timm-resnet18``. Data other than `PLAIN_DATA` follow: ``resnet18-cifar10``; of a folder
    its own name, ``resnet18-flowers`` for ``imagefolder:/data/flowers``.

    Args:
        model: as on the command line.
        data: as on the command line.
    """
    where, colon, factory = model.rpartition(":")
    module = Path(where).stem if where.endswith(".py") or "/" in where else where.rpartition(".")[2]
    words = [module, factory] if colon else [model]
    kind, colon, place = data.partition(":")
    if colon:
        words.append(expanded(place).resolve().name or kind)
    elif (word := re.sub("[-_]", "", kind).lower()) != PLAIN_DATA:
        words.append(word)
    name = "-".join(map(_legal, words))
    ending = next(filter(name.endswith, FOUND_ENDINGS), "")
    return name.removesuffix(ending) + ending.replace(".", "-")


def _legal(word: str) -> str:
    """``word`` with hyphens for what a run's name cannot hold; of a word that has nothing else, a digest."""
    legal = _ILLEGAL.sub("-", word).strip("-._")[:_LONGEST]
    return legal or hashlib.sha256(word.encode()).hexdigest()[:8]


def expanded(path: str) -> Path:
    """The path with the home folder for its ``~``; as it is where there is no such folder, or no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def run_and_artifact(name: str) -> tuple[str, str | None]:
    """The parts of ``RUN/ARTIFACT``; of a run alone the artifact is None. A last slash, which shells add, is none."""
    run, _, artifact = name.rstrip("/").partition("/")
    return run, artifact or None


def is_run_name(name: str) -> bool:
    """Whether a run can be called so.

    Of letters, digits, ``-``, ``_`` and ``.``, beginning with a letter or digit, without one of `FOUND_ENDINGS`.
    """
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name) is not None and not name.endswith(FOUND_ENDINGS)


def report_path(store: Path, run: str) -> Path:
    """The run's report."""
    return store / run / REPORT_FILE


def run_lock(run: str) -> str:
    """The name of the lock in `LOCKS` that whoever writes a run's folder holds."""
    return f"run-{run}"


def artifact_folder(store: Path, run: str, artifact: str) -> Path:
    """Where the files and the card of an artifact are."""
    return store / run / ARTIFACTS / artifact


def served_name(run: str, artifact: str) -> str:
    """What an artifact of a run is served as."""
    return f"{run}-{artifact}"


def archive_path(store: Path, run: str, artifact: str) -> Path:
    """Where the archive of an artifact is."""
    return store / run / ARCHIVES / f"{served_name(run, artifact)}.mar"


def archive_of(path: Path) -> Path:
    """The archive that a file beside archives is of: its signature, its bill of materials, or it itself."""
    return path.with_name(path.name.removesuffix(SIGNATURE_ENDING).removesuffix(SBOM_ENDING))


def model_anywhere(model: str) -> str:
    """A model's reference that means the same in any folder: with the whole path of its file."""
    where, colon, factory = model.rpartition(":")
    if colon and (where.endswith(".py") or "/" in where):
        return f"{expanded(where).resolve()}:{factory}"
    return model


def data_anywhere(data: str) -> str:
    """A data set's reference that means the same in any folder: with the whole path of its folder."""
    kind, colon, place = data.partition(":")
    return f"{kind}:{expanded(place).resolve()}" if colon else re.sub("[-_]", "", kind).lower()
