"""Certificates of this machine's own, for what speaks TLS."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def certify(folder: Path) -> tuple[Path, Path]:
    """A new certificate for this machine, and its key; the test is skipped where there is no openssl to make it."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    told = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
    made = ("-newkey", "rsa:2048", "-nodes", "-days", "2", "-out", certificate, "-keyout", key)
    subprocess.run(["openssl", "req", "-x509", *told, *made], check=True, capture_output=True)
    return certificate, key
