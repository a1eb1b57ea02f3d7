"""The style names of Hugging Face's plans, of transformers 4.5x to 5.x, in one vocabulary.

Read against transformers 5.23. Older names stand for today's; what has no meaning here is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping

from tp_styles.problems import PlanError, Problem

TODAY = (
    "colwise",
    "rowwise",
    "packed_colwise",
    "packed_rowwise",
    "colwise_gather_output",
    "rowwise_split_input",
    "embedding_rowwise",
    "embedding_colwise",
    "replicated_with_grad_allreduce",
    "replicate",
    "all_reduce",
    "moe_tp_experts",
    "moe_identity_expert",
    "mla_kv_a_proj",
    "local_params",
)

# Names that 4.5x and early 5.x used -> today's.
OLDER = {
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
    "local_colwise": "colwise",
    "local_rowwise": "rowwise",
    "local_packed_rowwise": "packed_rowwise",
    "local_packed_colwise": "packed_colwise",
    "replicated": "replicate",
    "gather": "all_reduce",
    "local": "local_params",
    "vocab_parallel": "embedding_rowwise",
}


EXPERTS = "grouped_gemm", "ep_dispatch_experts"
"""Names of expert-parallel plans (`base_model_ep_plan`): every rank holds all features of some experts."""


def todays_names(plan: Mapping[str, str]) -> dict[str, str]:
    """The plan in today's vocabulary.

    Raises:
        PlanError: Names that have no meaning here, all of them at once.
    """
    known = {**{name: name for name in TODAY}, **OLDER}
    unknown = [(key, name) for key, name in plan.items() if name not in known]
    if unknown:
        raise PlanError(_unknown(key, name) for key, name in unknown)
    return {key: known[name] for key, name in plan.items()}


def _unknown(key: str, name: str) -> Problem:
    if name in EXPERTS:
        hint = "the model's tp_plan shards the features of every expert instead; expert parallelism is not carried out"
        return Problem("expert-parallel", key, found=repr(name), hint=hint)
    return Problem("invalid-argument", key, found=repr(name), hint="known are " + ", ".join(TODAY))
