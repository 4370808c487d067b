"""Public models train as in eager, and every attention of theirs is rewritten or refused with a reason.

Cases of packages that are not installed skip (`make setup-public`). `GEMOPT_PUBLIC=all` runs every case; otherwise the
quick ones, which take about a minute on two cores.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from . import CASES, PublicCase, run

_ALL = os.environ.get("GEMOPT_PUBLIC") == "all"


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_equal_and_explained(case: PublicCase) -> None:
    if not (_ALL or case.quick):
        pytest.skip("runs with GEMOPT_PUBLIC=all")
    if case.missing():
        pytest.skip(case.missing())
    outcome = run(case if _ALL else replace(case, lengths=("skewed", "given")))
    assert not outcome.wrong, outcome.wrong
    assert outcome.result is not None and outcome.result.compared > 0
    assert outcome.silent == 0, f"{outcome.silent} of {case.sites} attentions are not in the report:\n{outcome.report}"
    assert all(r.reason and r.source for r in outcome.refused), outcome.refused
    assert outcome.done >= case.owed, str(outcome.report)
    assert not case.owed or any(path.startswith("packed") for path in outcome.ran.values()), outcome.ran
