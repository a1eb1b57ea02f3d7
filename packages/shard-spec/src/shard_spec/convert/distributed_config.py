"""Layouts from transformers' ``DistributedConfig``: sizes of parallelism and the plans of a model.

Written for transformers 5.23. Its dense mesh is ``(dp_replicate, fsdp, tp)``, that of experts ``(dp_replicate, efsdp,
ep)`` over the same ranks, with ``efsdp * ep == fsdp * tp``. Both are views of one finer mesh, since ``tp`` divides
``ep``: ``(dp_replicate, efsdp, ep, tp)``. There ``fsdp`` is ``(efsdp, ep)``, and an expert group is ``(ep, tp)``. If
``ep_size`` is ``tp_size`` or 1 it is ``(dp_replicate, fsdp, tp)``. Axes of one rank are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from shard_spec._shared.problems import PlanError, Problem, raise_problems
from shard_spec.convert.hf import from_hf_tp_plan, generic_name
from shard_spec.convert.parallelize import not_expressible
from shard_spec.layout.layout import Layout
from shard_spec.layout.mesh import MeshSpec
from shard_spec.layout.placements import REPLICATE, PlacementSpec, ShardSpec
from shard_spec.plan.metadata import metadata_of
from shard_spec.plan.resolve import resolve

_SIZES = ("pp_size", "dp_replicate_size", "fsdp_size", "tp_size", "ep_size")


def from_distributed_config(config: object, module: nn.Module) -> dict[str, Layout]:
    """Derive the layouts of a model's parameters; see ``ShardingPlan.from_distributed_config``."""
    settings: Any = config if isinstance(config, Mapping) else vars(config)
    pp, replicas, fsdp, tp, ep = (int(settings.get(name) or 1) for name in _SIZES)
    if pp > 1:
        hint = "import the plan of one stage"
        raise PlanError(not_expressible("pp_size", f"{pp} stages; which layers each holds is not in it", hint))
    if ep > 1 and (ep % tp or (fsdp * tp) % ep):
        hint = "ep_size is a multiple of tp_size and divides fsdp_size * tp_size"
        raise PlanError(Problem("invalid-mesh", "ep_size", found=f"ep {ep}, tp {tp}, fsdp {fsdp}", hint=hint))
    inner = max(ep // tp, 1)  # ranks of an expert group beside tp
    sizes = {"dp_replicate": replicas, "efsdp" if inner > 1 else "fsdp": fsdp // inner, "ep": inner, "tp": tp}
    mesh = MeshSpec({name: size for name, size in sizes.items() if size > 1} or {"tp": 1})  # a mesh needs an axis
    dense = MeshSpec({"dp_replicate": replicas, "fsdp": fsdp, "tp": tp})
    data = [name for name in ("fsdp", "efsdp", "ep") if name in mesh.axis_names]
    expert_styles = _plan_of(module, settings, "ep_plan") if ep > 1 else {}
    styles = _plan_of(module, settings, "tp_plan") if tp > 1 else {}
    is_expert = re.compile("|".join(rf"{re.escape(name)}(\..+)?" for name in expert_styles) or "(?!)").fullmatch
    styles = {name: style for name, style in styles.items() if not is_expert(name)}  # expert rules take precedence
    along_tp = _layouts_along_tp(styles, module, MeshSpec({"tp": tp}))
    layouts, problems = {}, []
    for tensor in metadata_of(module).parameters:
        shape, names = tensor.shape, [generic_name(alias) for alias in tensor.aliases]
        if any(expert_styles.get(name) == "grouped_gemm" for name in names):
            # The expert group first, then FSDP2 over the copies of the group.
            axes = [name for name in ("ep", "tp", "efsdp", "fsdp") if name in mesh.axis_names]
            layouts[tensor.name] = Layout(mesh, dict.fromkeys(axes, "S(0)"), axes if len(axes) > 1 else None)
            continue
        spec = along_tp.get(tensor.name, REPLICATE)
        sharded = data if shape else []  # FSDP2 does not shard scalars
        placements: dict[str, PlacementSpec] = {"tp": spec} if tp > 1 else {}
        placements.update(dict.fromkeys(sharded, ShardSpec(0)))  # FSDP2 shards dim 0
        order = [name for name in ("tp", *sharded) if name in placements and placements[name].dim is not None]
        layouts[tensor.name] = Layout(mesh, placements, order if len(order) > 1 else None)
        wanted = Layout(
            dense,
            {"tp": spec, **({"fsdp": "S(0)"} if sharded else {})},
            ["tp", "fsdp"] if spec.dim is not None and sharded else None,
        )
        if len(sharded) > 1 and not layouts[tensor.name].equivalent_to(wanted, shape):
            reason = f"{shape[0]} rows over fsdp={fsdp}, of which expert parallelism takes {inner}, do not divide"
            problems.append(not_expressible(tensor.name, reason, "choose sizes that divide its rows"))
    raise_problems(problems, "one mesh cannot express both views of the ranks")
    return layouts


def _plan_of(module: nn.Module, config: Mapping[str, Any], name: str) -> dict[str, str]:
    """Return the model's own plan merged with the rules of the config, as in transformers."""
    own, configured = dict(getattr(module, name, None) or {}), config.get(name)
    if not isinstance(configured, Mapping):
        return own
    metadata = metadata_of(module)
    names = {*map(generic_name, metadata.modules), *own}
    names |= {generic_name(alias) for tensor in metadata.parameters for alias in tensor.aliases}
    hint = "use the names of modules and parameters, '*' for layer numbers"
    unknown = [
        Problem("unmatched-pattern", str(key), found=f"in {name}", hint=hint) for key in configured if key not in names
    ]
    raise_problems(unknown, "the config does not fit the model")  # a typo would replicate silently
    return {} if name == "tp_plan" and not configured else {**own, **configured}  # an empty tp_plan turns it off


def _layouts_along_tp(styles: Mapping[str, str], module: nn.Module, mesh: MeshSpec) -> dict[str, PlacementSpec]:
    metadata = metadata_of(module)
    names = {generic_name(path) for path in metadata.modules}
    names |= {generic_name(alias) for tensor in metadata.parameters for alias in tensor.aliases}
    used = {name: style for name, style in styles.items() if name in names}  # a model's own plan may have more names
    content = from_hf_tp_plan(used, metadata, mesh, forward="drop")
    return {name: layout.specs[0] for name, layout in resolve(content, metadata).parameters.items()}
