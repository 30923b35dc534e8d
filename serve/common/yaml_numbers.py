"""YAML with the numbers of YAML 1.2, which are what they look like. PyYAML (6.0) reads YAML 1.1."""

from __future__ import annotations

import re
from typing import Any

import yaml

_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"

# The core schema's numbers (YAML 1.2.2, 10.3.2). PyYAML selects patterns by a scalar's first character.
_NUMBERS = (
    (_INT, re.compile(r"[-+]?[0-9]+$|0o[0-7]+$|0x[0-9a-fA-F]+$"), "-+0123456789"),
    (
        _FLOAT,
        re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"),
        "-+0123456789.",
    ),
)


class Loader(yaml.SafeLoader):
    """`yaml.SafeLoader` with ``010`` as ten, not eight, ``1e-3`` as a number and ``1:30`` as text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own class attribute
        first: [(tag, pattern) for tag, pattern in found if tag not in (_INT, _FLOAT)]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_yaml_int(self, node: Any) -> int:
        """Construct a whole number, also for an explicit tag."""
        text = str(self.construct_scalar(node))
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        return int(text if base == 10 else text[2:], base)


for _tag, _pattern, _first in _NUMBERS:
    Loader.add_implicit_resolver(_tag, _pattern, list(_first))
Loader.add_constructor(_INT, Loader.construct_yaml_int)
