"""Known vulnerabilities of the installation: Python packages by pip-audit, the libraries in TorchServe's jar by OSV.

Both query a database on the network. Without it only the installed versions are known. pip-audit does not know Java.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from serve.packing.jars import JavaLibrary, torchserve_jars
from serve.runtime.errors import PipelineError, UserError, first_line

#: https://google.github.io/osv.dev/post-v1-querybatch/
OSV = "https://api.osv.dev"
_TIMEOUT_S = 30.0
_MOST_PAGES = 50


class AuditError(PipelineError):
    """The audit failed, so nothing is known either way."""


@dataclass(frozen=True)
class Advisory:
    """A known vulnerability, by its name in the database, for example ``GHSA-wm47-8v5p-wjpj``."""

    library: JavaLibrary
    name: str


def bundled_libraries() -> tuple[JavaLibrary, ...]:
    """Return everything that TorchServe's jars bundle.

    Raises:
        AuditError: a jar is unknown.
    """
    found: list[JavaLibrary] = []
    for jar in torchserve_jars():
        if jar.bundled is None:
            raise AuditError(f"the jars were not checked: {jar.name} is not the one of TorchServe 0.12.0")
        found += jar.bundled
    return tuple(found)


def advisories(libraries: Sequence[JavaLibrary], *, osv: str = OSV) -> Iterator[Advisory]:
    """Yield the advisories for libraries with known versions.

    Args:
        libraries: the libraries. Those without a version are skipped.
        osv: address of OSV's interface.

    Raises:
        AuditError: OSV cannot be reached, or its answer is not as documented.
    """
    versioned = [library for library in libraries if library.version is not None]
    left: list[tuple[JavaLibrary, dict[str, Any]]] = [
        (
            library,
            {"package": {"ecosystem": "Maven", "name": f"{library.group}:{library.name}"}, "version": library.version},
        )
        for library in versioned
    ]
    try:
        for _ in range(_MOST_PAGES):
            queries = [query for _, query in left]
            answer = httpx.post(f"{osv}/v1/querybatch", json={"queries": queries}, timeout=_TIMEOUT_S)
            answer.raise_for_status()
            further = []
            for (library, query), result in zip(left, answer.json()["results"], strict=True):
                for entry in result.get("vulns", ()):
                    yield Advisory(library, str(entry["id"]))
                # For a slow query OSV returns a part, which may be empty, and a token for the rest.
                if token := result.get("next_page_token"):
                    further.append((library, {**query, "page_token": str(token)}))
            left = further
            if not left:
                return
        raise AuditError(f"not all jars were checked: OSV sent more than {_MOST_PAGES} pages of results")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise AuditError(
            f"the jars' {len(versioned)} known versions were not checked: OSV cannot be reached "
            f"({type(error).__name__}: {first_line(error)})"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise AuditError(f"unexpected answer from OSV ({type(error).__name__})") from None


@dataclass(frozen=True)
class PythonAudit:
    """A result of pip-audit: the number of checked packages, the skipped ones, and the vulnerabilities."""

    checked: int
    skipped: tuple[str, ...]
    found: tuple[str, ...]


def audit_python() -> PythonAudit:
    """Run pip-audit over this environment.

    Raises:
        UserError: pip-audit is not installed.
        AuditError: it cannot reach its database, or knows no installed package.
    """
    if importlib.util.find_spec("pip_audit") is None:
        raise UserError("the audit needs the extra 'audit': pip install 'optimize-and-serve[audit]'")
    command = [sys.executable, "-m", "pip_audit", "--skip-editable", "--progress-spinner", "off", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        return read_report(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise AuditError(f"the Python packages were not checked: pip-audit reports {last[:200]!r}") from None


def read_report(document: str) -> PythonAudit:
    """Parse the output of ``pip-audit --format json``.

    Raises:
        ValueError: the text is not such a report.
        AuditError: no package was checked. pip-audit itself would report that it found nothing.
    """
    try:
        entries = json.loads(document)["dependencies"]
        skipped = tuple(str(entry["name"]) for entry in entries if "skip_reason" in entry)
        checked = [entry for entry in entries if "skip_reason" not in entry]
        found = tuple(
            f"{entry['name']} {entry['version']}: {fault['id']}, mended in {', '.join(fault['fix_versions']) or 'none'}"
            for entry in checked
            for fault in entry["vulns"]
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"pip-audit wrote no valid report ({type(error).__name__})") from None
    if not checked:
        raise AuditError(
            f"the {len(skipped)} Python packages were not checked: the database of pip-audit has none of them"
        )
    return PythonAudit(len(checked), skipped, found)
