"""Import libraries that report to their makers so that they report nothing: a server tells nobody what it serves.

Both would also write an identifier into the user's home folder, where there is one.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any


def import_onnxruntime() -> Any:
    """Return ``onnxruntime``, which sends no events unless the user has set ``ORT_DISABLE_TELEMETRY=0``.

    Version 1.31 sends events about the process, its sessions and their models on Linux too (microsoft/onnxruntime
    pull request 27379). The variable is read once, when the library is loaded.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    return importlib.import_module("onnxruntime")


def import_openvino() -> Any:
    """Return ``openvino``, as it is where the package ``openvino-telemetry`` is not installed.

    Version 2026.4 sends events when it is imported, unless a file in the home folder or ``CI=true`` forbids it, and
    cannot be imported where no home folder can be found: by a user without an entry in /etc/passwd, without HOME.
    """
    if "openvino" in sys.modules or "openvino_telemetry" in sys.modules:
        return importlib.import_module("openvino")
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]  # an import fails, and is caught there
    try:
        return importlib.import_module("openvino")
    finally:
        del sys.modules["openvino_telemetry"]
