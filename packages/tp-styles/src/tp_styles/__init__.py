"""Tensor-parallel styles: prepare a module's inputs, outputs and parameters as DTensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tp_styles.__about__ import __version__ as __version__
from tp_styles._shared.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from tp_styles._shared.norms import clip_grad_norm_
    from tp_styles.apply import TPHandle, apply_plan, parallelize_module
    from tp_styles.compare_models import compare
    from tp_styles.legacy import (
        PairwiseParallel,
        make_input_replicate_1d,
        make_input_reshard_replicate,
        make_input_shard_1d,
        make_input_shard_1d_last_dim,
        make_output_replicate_1d,
        make_output_reshard_tensor,
        make_output_shard_1d,
        make_output_tensor,
        make_sharded_output_tensor,
    )
    from tp_styles.losses import sharded_cross_entropy, vocab_parallel_cross_entropy
    from tp_styles.plan.model import TPPlan
    from tp_styles.plan.planned import explain, plan_styles
    from tp_styles.problems import PlanError, Problem
    from tp_styles.runtime.dropout import tp_rng
    from tp_styles.sources.auto import auto_plan
    from tp_styles.sources.names import from_hf_tp_plan
    from tp_styles.sources.sharding_plan import apply_sharding_plan, from_sharding_plan
    from tp_styles.styles.attention import GQAParallel, MultiheadAttentionParallel, TransformerLayerParallel
    from tp_styles.styles.base import ParallelStyle
    from tp_styles.styles.blocks import BlockParallel, LoRAParallel, NoParallel, SequenceParallel
    from tp_styles.styles.context_parallel import ContextParallel
    from tp_styles.styles.expert_parallel import ExpertParallel, RouterLogits
    from tp_styles.styles.linear import ColwiseParallel, FusedColwiseParallel, RowwiseParallel
    from tp_styles.styles.prepare_module import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
    from tp_styles.training import full_state_dict

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
    "ExpertParallel",
    "RouterLogits",
    "ContextParallel",
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
    "sharded_cross_entropy",
    "clip_grad_norm_",
    "tp_rng",
    "compare",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "_shared.norms": ("clip_grad_norm_",),
        "apply": ("TPHandle", "apply_plan", "parallelize_module"),
        "compare_models": ("compare",),
        "legacy": (
            "PairwiseParallel",
            "make_input_replicate_1d",
            "make_input_reshard_replicate",
            "make_input_shard_1d",
            "make_input_shard_1d_last_dim",
            "make_output_replicate_1d",
            "make_output_reshard_tensor",
            "make_output_shard_1d",
            "make_output_tensor",
            "make_sharded_output_tensor",
        ),
        "losses": ("sharded_cross_entropy", "vocab_parallel_cross_entropy"),
        "plan.model": ("TPPlan",),
        "plan.planned": ("explain", "plan_styles"),
        "problems": ("PlanError", "Problem"),
        "runtime.dropout": ("tp_rng",),
        "sources.auto": ("auto_plan",),
        "sources.names": ("from_hf_tp_plan",),
        "sources.sharding_plan": ("apply_sharding_plan", "from_sharding_plan"),
        "styles.attention": ("GQAParallel", "MultiheadAttentionParallel", "TransformerLayerParallel"),
        "styles.base": ("ParallelStyle",),
        "styles.blocks": ("BlockParallel", "LoRAParallel", "NoParallel", "SequenceParallel"),
        "styles.expert_parallel": ("ExpertParallel", "RouterLogits"),
        "styles.context_parallel": ("ContextParallel",),
        "styles.linear": ("ColwiseParallel", "FusedColwiseParallel", "RowwiseParallel"),
        "styles.prepare_module": ("PrepareModuleInput", "PrepareModuleInputOutput", "PrepareModuleOutput"),
        "training": ("full_state_dict",),
    },
)
