"""Reads a file in one of torch's formats: only plain values, or with the user's trust any object."""

from __future__ import annotations

import argparse
import errno
import pathlib
import pickle
import re
import types
import warnings
from pathlib import Path
from typing import Any

import torch

from serve.runtime.errors import UserError, first_line

TRUST_FLAG = "--trust-checkpoint"

#: The first bytes of every file in torch's format before 1.6: the pickled magic number.
_LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."

#: Path classes of any system in pickles, and the classes they are read as: a WindowsPath cannot be made on Linux. In
#: Python 3.13 alone their module is ``pathlib._local``.
_PATHS: dict[tuple[str, str], type] = {
    (module, kind): pathlib.PureWindowsPath if "Windows" in kind else pathlib.PurePosixPath
    for module in ("pathlib", "pathlib._local")
    for kind in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
}
#: Types of settings that training scripts keep beside the weights, and that contain only plain values.
_PLAIN: list[Any] = [
    argparse.Namespace,
    *((kind, ".".join(name)) for name, kind in _PATHS.items()),
]


class _LacksClassError(Exception):
    """A pickle names a class or function that does not exist here."""


def load_pickle(path: Path, head: bytes, *, trust: bool, home: types.ModuleType | None = None) -> object:
    """Read a file of `torch.save`, onto the CPU.

    Args:
        path: the file.
        head: its first bytes.
        trust: unpickle it without restriction, which runs whatever code the file contains.
        home: the user's module, which is searched for classes whose own module does not exist here, such as
            ``__main__`` of the script that saved the file.

    Raises:
        UserError: it is damaged or not such a file, needs more than plain values while ``trust`` is false, or names a
            class that does not exist here.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Python 2 wrote text as bytes, and latin-1 can decode any of them.
            how: dict[str, Any] = {"map_location": "cpu", "encoding": "latin1"}
            if trust:
                return torch.load(path, weights_only=False, pickle_module=_pickle_with(home), **how)
            with torch.serialization.safe_globals(_PLAIN):
                return torch.load(path, weights_only=True, **how)
    except _LacksClassError as error:
        raise UserError(
            f"{path}: {error}; give the file that defines the class as the model (path/to/file.py:FACTORY), or "
            "save model.state_dict() and give that"
        ) from None
    except Exception as error:  # noqa: BLE001 - unpicklers raise KeyError, IndexError, EOFError, UnicodeError …
        raise _explained(error, path, head, trust=trust) from None


def _pickle_with(home: types.ModuleType | None) -> Any:
    """Return a pickle module for `torch.load` that searches ``home`` for classes too."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) in _PATHS:
                return _PATHS[module, name]
            try:
                return super().find_class(module, name)
            except (ImportError, AttributeError):
                found: Any = home
                for part in name.split("."):
                    found = getattr(found, part, None)
                if found is None:
                    raise _LacksClassError(f"it needs {module}.{name}, which cannot be found here") from None
                return found

    def load(file: Any, **options: Any) -> Any:
        return Unpickler(file, **options).load()

    return types.SimpleNamespace(__name__="pickle", Unpickler=Unpickler, load=load)


def _explained(error: Exception, path: Path, head: bytes, *, trust: bool) -> UserError:
    """Explain in the user's terms why a file cannot be read."""
    text = re.sub(r"\x1b\[\d*m", "", str(error))
    opt_in = f"if you trust the source of the file, add {TRUST_FLAG}"
    if not trust and (match := re.search(r"GLOBAL ([\w.]+)", text)):
        return UserError(
            f"{path}: contains more than weights, so loading it would run code: it needs the Python object "
            f"{match.group(1)}; {opt_in}"
        )
    if not head.startswith((b"PK\x03\x04", _LEGACY_MAGIC)):
        return UserError(f"{path}: {_unlike_torch(text, head, opt_in)}")
    # If a zip file is cut off within its last 64 kB or so, torch (2.14) seeks to before its beginning.
    broken = isinstance(error, EOFError) or (isinstance(error, OSError) and error.errno == errno.EINVAL)
    if broken or re.search(r"central directory|unexpected EOF|corrupted", text):
        return UserError(f"{path}: is truncated or corrupted; copy or download it again")
    if not trust and (match := re.search(r"WeightsUnpickler error:\s*(\S.*)", text)):
        return UserError(f"{path}: needs more than plain weights ({match.group(1)[:120]}); {opt_in}")
    return UserError(f"{path}: cannot be read as a checkpoint ({first_line(error)})")


def _unlike_torch(text: str, head: bytes, opt_in: str) -> str:
    """Identify a file that has none of torch's newer formats."""
    if "legacy .tar" in text:
        return f"torch's tar format of 2016 loads only by running code; {opt_in}"
    if head[8:9] == b"{":  # after eight bytes of its length
        return "looks like a safetensors file; rename it to end in .safetensors"
    return "is not a PyTorch checkpoint (nor does it end in .safetensors)"
