"""What the type checker cannot see: which of several kinds a thing is. Each function fails where it is another."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from torch import nn

from optimize.data.sources import Source

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def layer(module: nn.Module, name: str | int, kind: type[AnyModule]) -> AnyModule:
    """The submodule called ``name`` (``1`` is ``"1"``, as in a Sequential), which is a ``kind``."""
    found = module.get_submodule(str(name))
    assert isinstance(found, kind)
    return found


def file(source: Source) -> Path:
    """The image that is a file."""
    assert isinstance(source, Path)
    return source


def encoded(source: Source) -> bytes:
    """The image that is the bytes of a file."""
    assert isinstance(source, bytes)
    return source
