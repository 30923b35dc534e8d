"""YAML whose numbers are what they look like: those of YAML 1.2, where PyYAML (6.0) reads YAML 1.1."""

from __future__ import annotations

import re
from typing import Any

import yaml

_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"

# The core schema's (YAML 1.2.2, 10.3.2); PyYAML finds a pattern by the first character of what it is to fit.
_NUMBERS = (
    (_INT, re.compile(r"[-+]?[0-9]+$|0o[0-7]+$|0x[0-9a-fA-F]+$"), "-+0123456789"),
    (
        _FLOAT,
        re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"),
        "-+0123456789.",
    ),
)


class Loader(yaml.SafeLoader):
    """`yaml.SafeLoader`, for which ``010`` is ten and not eight, ``1e-3`` a number and ``1:30`` none."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - of PyYAML's own class
        first: [(tag, pattern) for tag, pattern in found if tag not in (_INT, _FLOAT)]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_yaml_int(self, node: Any) -> int:
        """A whole number, also where a tag says that it is one."""
        text = str(self.construct_scalar(node))
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        return int(text if base == 10 else text[2:], base)


for _tag, _pattern, _first in _NUMBERS:
    Loader.add_implicit_resolver(_tag, _pattern, list(_first))
Loader.add_constructor(_INT, Loader.construct_yaml_int)
