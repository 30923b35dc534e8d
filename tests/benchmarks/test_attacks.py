"""The benchmark of attacks: its section has its record's figures; `serve/test_attacks.py` has it attack a server."""

from __future__ import annotations

import dataclasses
from collections import Counter

from benchmarks import attacks
from benchmarks.attacks import Attacked, Cost

FOUND = Attacked(
    "tiny as torch",
    costs=(
        Cost("a bomb", 1234, Counter({413: 15}), 0.51, 0),
        Cost("damaged", 620, Counter({200: 3, 415: 7}), 1.26, 2_500_000),
    ),
    idle=290_000_000,
    held=(300_000_000, 301_000_000, 300_500_000),
    refusals=Counter({413: 1900, 400: 100}),
    seconds=12.4,
    good=(3.04, 2.96),
    same=True,
)


def test_the_section_has_the_figures_and_the_command() -> None:
    text = attacks.page(FOUND, ["--repeats", "2", "--write", "docs/explanations/security.md"])
    assert "`python -m benchmarks.attacks --repeats 2`" in text
    assert "| a bomb | 1,234 | 413 | 0.5 | 0.0 |" in text
    assert "| damaged | 620 | 200: 3, 415: 7 | 1.3 | 2.5 |" in text
    assert "2,000 refusals, of those kinds in turns, took 12 s" in text
    assert "100 with 400, 1,900 with 413" in text
    assert "290.0 MB before everything, 300.0 before these, and after each quarter of them 301.0, 300.5: +0.5" in text
    assert "as before, byte for byte: in 3.0 ms before all this, in 3.0 ms after it" in text


def test_a_5xx_or_another_answer_to_the_honest_image_fails() -> None:
    assert FOUND.holds
    assert not dataclasses.replace(FOUND, same=False).holds
    assert not dataclasses.replace(FOUND, refusals=Counter({413: 10, 500: 1})).holds
    lost = Cost("a bomb", 1, Counter({413: 14, 503: 1}), 1.0, 0)
    assert not dataclasses.replace(FOUND, costs=(lost,)).holds
