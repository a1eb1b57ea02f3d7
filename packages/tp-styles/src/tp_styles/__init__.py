"""Tensor-parallel styles: prepare a module's inputs, outputs and parameters as DTensors."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from tp_styles.__about__ import __version__

if TYPE_CHECKING:
    from tp_styles.apply import apply_plan as apply_plan
    from tp_styles.clip import clip_grad_norm_ as clip_grad_norm_
    from tp_styles.from_plan.convert import from_sharding_plan as from_sharding_plan
    from tp_styles.handle import TPHandle as TPHandle
    from tp_styles.hf.auto import auto_plan as auto_plan
    from tp_styles.hf.plan import from_hf_tp_plan as from_hf_tp_plan
    from tp_styles.legacy.pairwise import PairwiseParallel as PairwiseParallel
    from tp_styles.legacy.pairwise import PairwiseSequenceParallel as PairwiseSequenceParallel
    from tp_styles.legacy.prepare import make_input_replicate_1d as make_input_replicate_1d
    from tp_styles.legacy.prepare import make_input_reshard_replicate as make_input_reshard_replicate
    from tp_styles.legacy.prepare import make_input_shard_1d as make_input_shard_1d
    from tp_styles.legacy.prepare import make_input_shard_1d_last_dim as make_input_shard_1d_last_dim
    from tp_styles.legacy.prepare import make_output_replicate_1d as make_output_replicate_1d
    from tp_styles.legacy.prepare import make_output_reshard_tensor as make_output_reshard_tensor
    from tp_styles.legacy.prepare import make_output_shard_1d as make_output_shard_1d
    from tp_styles.legacy.prepare import make_output_tensor as make_output_tensor
    from tp_styles.legacy.prepare import make_sharded_output_tensor as make_sharded_output_tensor
    from tp_styles.loss import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
    from tp_styles.parallelize import parallelize_module as parallelize_module
    from tp_styles.plan.planned import TPPlan as TPPlan
    from tp_styles.plan.planned import explain as explain
    from tp_styles.plan.planned import plan_styles as plan_styles
    from tp_styles.problems import PlanError as PlanError
    from tp_styles.problems import Problem as Problem
    from tp_styles.rng import tp_rng as tp_rng
    from tp_styles.spec import Flow as Flow
    from tp_styles.spec import ModuleInfo as ModuleInfo
    from tp_styles.spec import ParameterInfo as ParameterInfo
    from tp_styles.spec import ParameterSpec as ParameterSpec
    from tp_styles.spec import StyleSpec as StyleSpec
    from tp_styles.split import Section as Section
    from tp_styles.split import Split as Split
    from tp_styles.state import full_state_dict as full_state_dict
    from tp_styles.styles.base import ParallelStyle as ParallelStyle
    from tp_styles.styles.colwise import ColwiseParallel as ColwiseParallel
    from tp_styles.styles.fused import FusedColwiseParallel as FusedColwiseParallel
    from tp_styles.styles.gqa import GQAParallel as GQAParallel
    from tp_styles.styles.lora import LoRAParallel as LoRAParallel
    from tp_styles.styles.mha import MultiheadAttentionParallel as MultiheadAttentionParallel
    from tp_styles.styles.prepare_module import PrepareModuleInput as PrepareModuleInput
    from tp_styles.styles.prepare_module import PrepareModuleInputOutput as PrepareModuleInputOutput
    from tp_styles.styles.prepare_module import PrepareModuleOutput as PrepareModuleOutput
    from tp_styles.styles.replicated import NoParallel as NoParallel
    from tp_styles.styles.rowwise import RowwiseParallel as RowwiseParallel
    from tp_styles.styles.sequence import SequenceParallel as SequenceParallel
    from tp_styles.styles.transformer import TransformerLayerParallel as TransformerLayerParallel

# Public name -> (module, name there). Looked up lazily, so that `import tp_styles` does not import torch.
_WHERE = {
    # today's styles
    "ParallelStyle": ("styles.base", "ParallelStyle"),
    "ColwiseParallel": ("styles.colwise", "ColwiseParallel"),
    "RowwiseParallel": ("styles.rowwise", "RowwiseParallel"),
    "SequenceParallel": ("styles.sequence", "SequenceParallel"),
    "PrepareModuleInput": ("styles.prepare_module", "PrepareModuleInput"),
    "PrepareModuleOutput": ("styles.prepare_module", "PrepareModuleOutput"),
    "PrepareModuleInputOutput": ("styles.prepare_module", "PrepareModuleInputOutput"),
    "FusedColwiseParallel": ("styles.fused", "FusedColwiseParallel"),
    "GQAParallel": ("styles.gqa", "GQAParallel"),
    "MultiheadAttentionParallel": ("styles.mha", "MultiheadAttentionParallel"),
    "TransformerLayerParallel": ("styles.transformer", "TransformerLayerParallel"),
    "LoRAParallel": ("styles.lora", "LoRAParallel"),
    "NoParallel": ("styles.replicated", "NoParallel"),
    # the first styles
    "PairwiseParallel": ("legacy.pairwise", "PairwiseParallel"),
    "PairwiseSequenceParallel": ("legacy.pairwise", "PairwiseSequenceParallel"),
    "make_input_replicate_1d": ("legacy.prepare", "make_input_replicate_1d"),
    "make_input_reshard_replicate": ("legacy.prepare", "make_input_reshard_replicate"),
    "make_input_shard_1d": ("legacy.prepare", "make_input_shard_1d"),
    "make_input_shard_1d_last_dim": ("legacy.prepare", "make_input_shard_1d_last_dim"),
    "make_sharded_output_tensor": ("legacy.prepare", "make_sharded_output_tensor"),
    "make_output_replicate_1d": ("legacy.prepare", "make_output_replicate_1d"),
    "make_output_reshard_tensor": ("legacy.prepare", "make_output_reshard_tensor"),
    "make_output_tensor": ("legacy.prepare", "make_output_tensor"),
    "make_output_shard_1d": ("legacy.prepare", "make_output_shard_1d"),
    # plan
    "plan_styles": ("plan.planned", "plan_styles"),
    "explain": ("plan.planned", "explain"),
    "TPPlan": ("plan.planned", "TPPlan"),
    "Problem": ("problems", "Problem"),
    "PlanError": ("problems", "PlanError"),
    "from_sharding_plan": ("from_plan.convert", "from_sharding_plan"),
    "from_hf_tp_plan": ("hf.plan", "from_hf_tp_plan"),
    "auto_plan": ("hf.auto", "auto_plan"),
    # act
    "apply_plan": ("apply", "apply_plan"),
    "TPHandle": ("handle", "TPHandle"),
    "parallelize_module": ("parallelize", "parallelize_module"),
    "full_state_dict": ("state", "full_state_dict"),
    # train
    "vocab_parallel_cross_entropy": ("loss", "vocab_parallel_cross_entropy"),
    "clip_grad_norm_": ("clip", "clip_grad_norm_"),
    "tp_rng": ("rng", "tp_rng"),
    # for styles of one's own
    "Split": ("split", "Split"),
    "Section": ("split", "Section"),
    "ModuleInfo": ("spec", "ModuleInfo"),
    "ParameterInfo": ("spec", "ParameterInfo"),
    "ParameterSpec": ("spec", "ParameterSpec"),
    "Flow": ("spec", "Flow"),
    "StyleSpec": ("spec", "StyleSpec"),
}

__all__ = [
    "__version__",
    "ParallelStyle",
    "ColwiseParallel",
    "RowwiseParallel",
    "SequenceParallel",
    "PrepareModuleInput",
    "PrepareModuleOutput",
    "PrepareModuleInputOutput",
    "FusedColwiseParallel",
    "GQAParallel",
    "MultiheadAttentionParallel",
    "TransformerLayerParallel",
    "LoRAParallel",
    "NoParallel",
    "PairwiseParallel",
    "PairwiseSequenceParallel",
    "make_input_replicate_1d",
    "make_input_reshard_replicate",
    "make_input_shard_1d",
    "make_input_shard_1d_last_dim",
    "make_sharded_output_tensor",
    "make_output_replicate_1d",
    "make_output_reshard_tensor",
    "make_output_tensor",
    "make_output_shard_1d",
    "plan_styles",
    "explain",
    "TPPlan",
    "Problem",
    "PlanError",
    "from_sharding_plan",
    "from_hf_tp_plan",
    "auto_plan",
    "apply_plan",
    "TPHandle",
    "parallelize_module",
    "full_state_dict",
    "vocab_parallel_cross_entropy",
    "clip_grad_norm_",
    "tp_rng",
    "Split",
    "Section",
    "ModuleInfo",
    "ParameterInfo",
    "ParameterSpec",
    "Flow",
    "StyleSpec",
]


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _WHERE[name]
    value = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
