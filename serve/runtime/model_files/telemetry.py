"""Imports libraries without their telemetry, because a server must not report what it serves.

Both libraries would also write an identifier into the user's home folder, if there is one.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any


def import_onnxruntime() -> Any:
    """Return ``onnxruntime``. It sends no events, unless the user has set ``ORT_DISABLE_TELEMETRY=0``.

    Version 1.31 sends events about the process, its sessions and their models, also on Linux (microsoft/onnxruntime
    pull request 27379). It reads the variable once, when the library is loaded.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    return importlib.import_module("onnxruntime")


def import_openvino() -> Any:
    """Return ``openvino``, as if the package ``openvino-telemetry`` were not installed.

    Version 2026.4 sends events at import, unless a file in the home folder or ``CI=true`` forbids it. Its import also
    fails without a home folder, for a user without HOME and without an entry in /etc/passwd.
    """
    if "openvino" in sys.modules or "openvino_telemetry" in sys.modules:
        return importlib.import_module("openvino")
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]  # openvino catches the failed import
    try:
        return importlib.import_module("openvino")
    finally:
        del sys.modules["openvino_telemetry"]
