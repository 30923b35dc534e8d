"""Libraries that would report to their makers: none does, and none needs a home folder."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from optimize.data.cache_folders import cache_folder
from serve.common.layout import expanded
from serve.runtime.errors import UserError

ROOT = Path(__file__).parents[4]

_OPEN_BOTH = """
import os, sys
assert not {"openvino", "onnxruntime"} & set(sys.modules)
from serve.runtime.engines.openvino import core
from serve.runtime.model_files.onnx_session import runtime
print(core().available_devices, runtime().get_available_providers()[-1])
print("openvino_telemetry" in sys.modules, os.environ.get("ORT_DISABLE_TELEMETRY"))
"""


#: As for a user without an entry in /etc/passwd.
_NOBODY = """
import pwd
def _nobody(uid):
    raise KeyError(uid)
pwd.getpwuid = _nobody
"""


def opened(environment: dict[str, str], *, before: str = "") -> list[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("HOME", "CI", "ORT_DISABLE_TELEMETRY")}
    environment = {**kept, **environment}
    program = [sys.executable, "-c", before + _OPEN_BOTH]
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_engines_send_nothing_and_leave_no_identifier_in_the_home_folder(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    said = opened({"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert said == ["['CPU'] CPUExecutionProvider", "False 1"]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_who_wants_onnx_runtimes_events_may_have_them(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    said = opened({"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "ORT_DISABLE_TELEMETRY": "0"})
    assert said[-1] == "False 0"


def test_both_engines_open_for_a_user_without_a_home_folder() -> None:
    pytest.importorskip("openvino")
    assert opened({}, before=_NOBODY)[0] == "['CPU'] CPUExecutionProvider"


def test_a_cache_without_a_home_folder_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(UserError, match="no home folder: set XDG_CACHE_HOME to a folder for caches"):
        cache_folder("sources")


def test_a_path_below_the_home_of_nobody_is_a_path_that_is_not_there() -> None:
    assert expanded("~no-such-user/photos") == Path("~no-such-user/photos")
