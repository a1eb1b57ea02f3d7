"""A problem has one text, and errors travel between processes."""

from __future__ import annotations

import pickle

from shared.problems import PlanError, Problem


def test_problem_text_and_pickle() -> None:
    problem = Problem("uneven-shards", "fc.weight", dim=0, axis="tp", found="10 rows on 4 ranks", hint="pad it")
    assert str(problem) == "[uneven-shards] fc.weight, dim 0, axis 'tp': 10 rows on 4 ranks -> pad it"
    error = PlanError([problem, Problem("other")])
    assert str(error).splitlines() == ["2 problems", str(problem), "[other]"]
    copied = pickle.loads(pickle.dumps(error))
    assert (copied.problems, str(copied)) == (error.problems, str(error))
