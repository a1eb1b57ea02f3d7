"""What the five packages have in common without importing it from each other."""

from __future__ import annotations

import dataclasses
import importlib
import pickle
from types import ModuleType

import pytest

PACKAGES = ("shard_spec", "shard_reshard", "tp_styles", "dp_partition", "tp_ddp_bridge")
FIELDS = [("code", True), ("name", False), ("dim", False), ("axis", False), ("found", False), ("hint", False)]


@pytest.fixture(params=PACKAGES)
def package(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


def test_problems_have_the_same_fields_in_every_package(package: ModuleType) -> None:
    fields = [(f.name, f.default is dataclasses.MISSING) for f in dataclasses.fields(package.Problem)]
    assert fields == FIELDS


def test_a_plan_error_is_a_value_error_that_lists_every_problem_and_can_be_sent(package: ModuleType) -> None:
    problems = (
        package.Problem("first-code", name="blocks.0.wq", dim=1, axis="tp", found="3 rows", hint="use 2 or 4"),
        package.Problem("second-code", name="head"),
    )
    error = pickle.loads(pickle.dumps(package.PlanError(problems)))
    assert isinstance(error, ValueError)
    assert vars(error)["problems"] == problems
    for word in ("first-code", "blocks.0.wq", "tp", "3 rows", "use 2 or 4", "second-code", "head"):
        assert word in str(error)


def test_every_public_name_exists(package: ModuleType) -> None:
    assert len(package.__all__) > 5
    assert [name for name in package.__all__ if not hasattr(package, name)] == []


def test_packages_are_installed_wheels_and_not_a_source_tree(package: ModuleType) -> None:
    assert package.__file__ is not None
    assert "site-packages" in package.__file__
