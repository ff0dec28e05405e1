"""The standard masks at the size that a page shows."""

from __future__ import annotations

import pytest

from maskc.report.cases import Subject, case, standard
from maskc.report.gallery import EXAMPLES

PLANNED = ("causal", "doc_prefix", "global_window", "cross_pairs")


@pytest.fixture(scope="session")
def subjects() -> dict[str, Subject]:
    """Every standard mask; those in PLANNED with plans, at four times the length."""
    plain = {s.name: s for s in standard(1)}
    assert list(plain) == list(EXAMPLES)
    return plain | {s.name: s for s in standard(4, PLANNED)}


@pytest.fixture(scope="session")
def cases(subjects: dict[str, Subject]) -> dict[str, dict[str, object]]:
    return {name: dict(case(s)) for name, s in subjects.items()}
