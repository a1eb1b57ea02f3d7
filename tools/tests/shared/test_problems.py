"""A problem has one text, and errors travel between processes."""

from __future__ import annotations

import importlib.util
import pickle
import sys

import pytest
from shared import problems
from shared.problems import PlanError, Problem, own_errors


def test_problem_text_and_pickle() -> None:
    problem = Problem("uneven-shards", "fc.weight", dim=0, axis="tp", found="10 rows on 4 ranks", hint="pad it")
    assert str(problem) == "[uneven-shards] fc.weight, dim 0, axis 'tp': 10 rows on 4 ranks -> pad it"
    error = PlanError([problem, Problem("other")])
    assert str(error).splitlines() == ["2 problems", str(problem), "[other]"]
    copied = pickle.loads(pickle.dumps(error))
    assert (copied.problems, str(copied)) == (error.problems, str(error))


def test_the_error_of_another_copy_is_raised_as_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("other", problems.__file__)  # the same source in another wheel
    assert spec is not None and spec.loader is not None
    other = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "other", other)
    spec.loader.exec_module(other)

    class Narrow(other.PlanError, RuntimeError):  # type: ignore[misc, name-defined]  # a module loaded here has no types
        """Another package's error, under another name."""

    for kind in (other.PlanError, Narrow):
        with pytest.raises(PlanError, match="two: ") as caught, own_errors():
            raise kind(other.Problem("ranks-disagree", found="it"), "two: ")
        assert isinstance(caught.value.__cause__, kind)
        assert [problem.code for problem in caught.value.problems] == ["ranks-disagree"]


@pytest.mark.parametrize("error", [type("PlanError", (ValueError,), {})("x"), ValueError("x"), PlanError(())])
def test_other_errors_pass_as_they_are(error: ValueError) -> None:
    with pytest.raises(ValueError) as caught, own_errors():
        raise error
    assert caught.value is error
