"""The problem record and the error of shard-spec, on which this package builds."""

from shard_spec import PlanError as PlanError
from shard_spec import Problem as Problem
