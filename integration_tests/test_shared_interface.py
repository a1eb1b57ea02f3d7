"""The five packages share error fields, argument names and plan methods, and none imports them from another."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import pickle
from types import ModuleType
from typing import Any

import dp_partition
import pytest
import shard_reshard
import shard_spec
import tp_styles
from shard_spec.apply.handle import ShardHandle

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


def test_functions_take_model_mesh_and_plan_in_this_order() -> None:
    functions: list[Any] = [tp_styles.apply_plan, tp_styles.apply_sharding_plan, shard_spec.apply_plan]
    for function in functions:
        first, *others = list(inspect.signature(function).parameters)[:3]
        assert first in ("model", "module")
        assert others == ["mesh", "plan"], function


def test_plans_explain_themselves_and_have_a_digest_and_json() -> None:
    plans: list[Any] = [
        shard_spec.ShardingPlan,
        shard_reshard.ReshardPlan,
        tp_styles.TPPlan,
        dp_partition.PartitionPlan,
    ]
    for plan in plans:
        assert next(iter(list(inspect.signature(plan.explain).parameters)[1:])) == "name"
        assert callable(plan.to_json)
        assert isinstance(inspect.getattr_static(plan, "digest"), property | functools.cached_property), plan
    assert callable(shard_spec.ShardingPlan.from_json)


def test_handles_undo() -> None:
    for handle in (ShardHandle, tp_styles.TPHandle):
        assert list(inspect.signature(handle.undo).parameters) == ["self"]
        assert "Module" in str(inspect.signature(handle.undo).return_annotation)


def test_patterns_and_sharding_infos_are_one_dialect() -> None:
    packages = {
        "patterns": ("shard_spec", "tp_styles"),
        "sharding_info": ("shard_spec", "shard_reshard", "tp_styles", "tp_ddp_bridge"),
        "consensus": PACKAGES,
        "problems": ("shard_spec", "tp_styles", "dp_partition", "tp_ddp_bridge"),
        "stale_parameters": ("shard_spec", "tp_styles", "dp_partition", "tp_ddp_bridge"),
    }
    for name, users in packages.items():
        texts = set()
        for user in users:
            if importlib.util.find_spec(f"{user}._shared.{name}") is None and name == "consensus":
                continue  # shard-reshard exchanges headers by code of its own
            texts.add(inspect.getsource(importlib.import_module(f"{user}._shared.{name}")))
        assert len(texts) == 1, name
