"""Tensor-parallel styles: prepare a module's inputs, outputs and parameters as DTensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tp_styles.__about__ import __version__ as __version__
from tp_styles._shared.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from tp_styles._shared.norms import clip_grad_norm_ as clip_grad_norm_
    from tp_styles.apply import apply_plan as apply_plan
    from tp_styles.from_plan.carry_out import apply_sharding_plan as apply_sharding_plan
    from tp_styles.from_plan.convert import from_sharding_plan as from_sharding_plan
    from tp_styles.handle import TPHandle as TPHandle
    from tp_styles.hf.auto import auto_plan as auto_plan
    from tp_styles.hf.plan import from_hf_tp_plan as from_hf_tp_plan
    from tp_styles.legacy.prepare import make_input_replicate_1d as make_input_replicate_1d
    from tp_styles.legacy.prepare import make_input_reshard_replicate as make_input_reshard_replicate
    from tp_styles.legacy.prepare import make_input_shard_1d as make_input_shard_1d
    from tp_styles.legacy.prepare import make_input_shard_1d_last_dim as make_input_shard_1d_last_dim
    from tp_styles.legacy.prepare import make_output_replicate_1d as make_output_replicate_1d
    from tp_styles.legacy.prepare import make_output_reshard_tensor as make_output_reshard_tensor
    from tp_styles.legacy.prepare import make_output_shard_1d as make_output_shard_1d
    from tp_styles.legacy.prepare import make_output_tensor as make_output_tensor
    from tp_styles.legacy.prepare import make_sharded_output_tensor as make_sharded_output_tensor
    from tp_styles.legacy.styles import PairwiseParallel as PairwiseParallel
    from tp_styles.parallelize import parallelize_module as parallelize_module
    from tp_styles.plan.planned import TPPlan as TPPlan
    from tp_styles.plan.planned import explain as explain
    from tp_styles.plan.planned import plan_styles as plan_styles
    from tp_styles.problems import PlanError as PlanError
    from tp_styles.problems import Problem as Problem
    from tp_styles.runtime.rng import tp_rng as tp_rng
    from tp_styles.styles.base import ParallelStyle as ParallelStyle
    from tp_styles.styles.colwise import ColwiseParallel as ColwiseParallel
    from tp_styles.styles.fused import FusedColwiseParallel as FusedColwiseParallel
    from tp_styles.styles.gqa import GQAParallel as GQAParallel
    from tp_styles.styles.lora import LoRAParallel as LoRAParallel
    from tp_styles.styles.mha import MultiheadAttentionParallel as MultiheadAttentionParallel
    from tp_styles.styles.mha import TransformerLayerParallel as TransformerLayerParallel
    from tp_styles.styles.prepare_module import PrepareModuleInput as PrepareModuleInput
    from tp_styles.styles.prepare_module import PrepareModuleInputOutput as PrepareModuleInputOutput
    from tp_styles.styles.prepare_module import PrepareModuleOutput as PrepareModuleOutput
    from tp_styles.styles.replicated import NoParallel as NoParallel
    from tp_styles.styles.replicated import SequenceParallel as SequenceParallel
    from tp_styles.styles.rowwise import RowwiseParallel as RowwiseParallel
    from tp_styles.styles.tp_block import BlockParallel as BlockParallel
    from tp_styles.training.loss import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
    from tp_styles.training.state import full_state_dict as full_state_dict

__all__ = [
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
    "BlockParallel",
    "NoParallel",
    "PairwiseParallel",
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
    "apply_sharding_plan",
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
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "styles.base": ("ParallelStyle",),
        "styles.colwise": ("ColwiseParallel",),
        "styles.rowwise": ("RowwiseParallel",),
        "styles.prepare_module": ("PrepareModuleInput", "PrepareModuleOutput", "PrepareModuleInputOutput"),
        "styles.fused": ("FusedColwiseParallel",),
        "styles.gqa": ("GQAParallel",),
        "styles.mha": ("MultiheadAttentionParallel", "TransformerLayerParallel"),
        "styles.lora": ("LoRAParallel",),
        "styles.tp_block": ("BlockParallel",),
        "styles.replicated": ("NoParallel", "SequenceParallel"),
        "legacy.styles": ("PairwiseParallel",),
        "legacy.prepare": (
            "make_input_replicate_1d",
            "make_input_reshard_replicate",
            "make_input_shard_1d",
            "make_input_shard_1d_last_dim",
            "make_sharded_output_tensor",
            "make_output_replicate_1d",
            "make_output_reshard_tensor",
            "make_output_tensor",
            "make_output_shard_1d",
        ),
        "plan.planned": ("plan_styles", "explain", "TPPlan"),
        "problems": ("Problem", "PlanError"),
        "from_plan.carry_out": ("apply_sharding_plan",),
        "from_plan.convert": ("from_sharding_plan",),
        "hf.plan": ("from_hf_tp_plan",),
        "hf.auto": ("auto_plan",),
        "apply": ("apply_plan",),
        "handle": ("TPHandle",),
        "parallelize": ("parallelize_module",),
        "training.state": ("full_state_dict",),
        "training.loss": ("vocab_parallel_cross_entropy",),
        "_shared.norms": ("clip_grad_norm_",),
        "runtime.rng": ("tp_rng",),
    },
)
