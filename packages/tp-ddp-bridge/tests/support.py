"""The support table, `SUPPORT.md`: what works, what is refused, and the test that shows it.

`python tests/support.py` writes it; a test compares.
"""

from __future__ import annotations

import ast
from pathlib import Path

RIGHT = "right"

# what, how it comes out, the test that shows it
ROWS: list[tuple[str, str, str]] = [
    ("DDP with its defaults, MLP and transformer", RIGHT, "test_ddp.py::test_options"),
    (
        "`find_unused_parameters`, parameters that are never or sometimes used",
        RIGHT,
        "test_ddp.py::test_unused_parameters",
    ),
    ("`static_graph`", RIGHT, "test_ddp.py::test_transformer_options"),
    ("`gradient_as_bucket_view`, `batched_grad_copy`, tiny buckets", RIGHT, "test_ddp.py::test_options"),
    ("`no_sync()` accumulation; two forwards, one backward", RIGHT, "test_ddp.py::test_ways_to_step"),
    ("`join()` where a rank has no input", RIGHT, "test_ddp.py::test_join_where_a_rank_has_no_input_at_all"),
    ("`join()` with uneven inputs", RIGHT, "test_ddp.py::test_join_with_uneven_inputs"),
    (
        "penalties over all parameters, through `module.state_dict(keep_vars=True)`",
        RIGHT,
        "module/test_transform.py::test_the_way_on_for_a_penalty_trains_as_one_process",
    ),
    (
        "weights averaged over steps: `AveragedModel(ddp.module)`",
        RIGHT,
        "test_ddp.py::test_weights_are_averaged_through_the_module_inside",
    ),
    ("fp16, bf16 and PowerSGD hooks", RIGHT, "test_ddp.py::test_communication_hooks"),
    (
        "communication hooks of users, tried when they are registered",
        RIGHT,
        "test_ddp.py::test_a_right_hook_of_a_user_trains_as_one_process",
    ),
    (
        "a hook of a user that averages over other ranks, or does not average",
        "refused: `invalid-hook`, on all ranks",
        "test_ddp.py::test_hooks_of_users_are_tried_when_they_are_registered",
    ),
    (
        "torch's `clip_grad_norm_` on leaves; norms and elements of `parameter.grad`, also in hooks",
        "refused: `local-shard-as-full`",
        "module/test_transform.py::test_gradients_are_refused_as_leaves_are",
    ),
    (
        "gradients of replicated parameters that each rank scaled otherwise, at the optimizer's step",
        "refused: `gradients-differ`",
        "optim/test_elementwise.py::test_gradients_that_are_scaled_by_one_ranks_shards_raise_at_the_step",
    ),
    (
        "hooks that are registered on what an attribute reads; post-accumulate hooks from before the bridge",
        "refused: `RuntimeError`, `parameter-hooks`",
        "module/test_eager.py::test_hooks_registered_through_an_attribute",
    ),
    (
        "`norm()`, `std()`, `mean()` and other reads of a full parameter on a sharded leaf; draws of `nn.init` into it",
        "refused: `local-shard-as-full`",
        "module/test_transform.py::test_reads_and_draws_of_a_full_weight_are_refused_on_shards",
    ),
    (
        "`torch.norm(leaf)`, `svdvals(leaf)`, `leaf.abs().max()`, penalties `(leaf * leaf).sum()`",
        "refused: `local-shard-as-full`",
        "module/test_transform.py::test_functions_that_take_a_leaf_for_the_full_weight_are_refused",
    ),
    (
        "`AveragedModel(ddp)`, copies and pickles of the DDP (those of `ddp.module` work)",
        "refused: `unsupported-wrapper`",
        "test_ddp.py::test_weights_are_averaged_through_the_module_inside",
    ),
    (
        "`undo()` of what sharded the model while it is bridged",
        "refused: `parameter-replaced`",
        "module/test_transform.py::test_full_parameters_are_refused_in_the_place_of_leaves",
    ),
    (
        "a hook state over other ranks than DDP's",
        "refused: `mesh-mismatch`",
        "test_ddp.py::test_hooks_over_the_wrong_ranks_are_refused",
    ),
    ("`ZeroRedundancyOptimizer` built after the bridge", RIGHT, "test_ddp.py::test_zero_1"),
    (
        "`ZeroRedundancyOptimizer` given as `optimizers=`",
        "refused: `unsupported-wrapper`",
        "optim/test_repoint.py::test_zero_is_refused_by_name",
    ),
    ("activation checkpointing, reentrant and not", RIGHT, "test_ddp.py::test_activation_checkpointing"),
    ("autocast", RIGHT, "test_ddp.py::test_autocast"),
    (
        "float16 loss scaling with `tp_ddp_bridge.GradScaler`, fused optimizers too",
        RIGHT,
        "optim/test_scaler.py::test_ranks_skip_a_step_together",
    ),
    ("`SequenceParallel`", RIGHT, "test_ddp.py::test_sequence_and_loss_parallel"),
    ("`loss_parallel`", RIGHT, "test_ddp.py::test_sequence_and_loss_parallel"),
    ("a `transformers` model", RIGHT, "test_ddp.py::test_a_transformers_model"),
    (
        "`torch.compile(fullgraph=True)` of the inner module",
        RIGHT,
        "module/test_view.py::test_compiles_without_a_break",
    ),
    ("3-D meshes: two data axes, two tensor axes", RIGHT, "test_api.py::test_three_axes"),
    (
        "tied, frozen and integer parameters, `ParameterList`, `ParameterDict`",
        RIGHT,
        "module/test_transform.py::test_ties_frozen_integers_and_attributes",
    ),
    ("DTensor buffers", RIGHT, "module/test_view_class.py::test_buffers"),
    (
        "gradient hooks from before the bridge, and their handles",
        RIGHT,
        "module/test_eager.py::test_users_hooks_see_dtensors_before_under_and_after",
    ),
    (
        "`deepcopy`, `pickle`, `torch.save` of the module",
        RIGHT,
        "module/test_view_class.py::test_copies_and_pickles_stay_bridged",
    ),
    (
        "`.to()`, `zero_grad()`, evaluation before the first step",
        RIGHT,
        "module/test_view_class.py::test_to_and_zero_grad_and_eval",
    ),
    (
        "submodules called directly, writes in place through an attribute",
        RIGHT,
        "module/test_eager.py::test_submodules_called_directly_and_writes_in_place",
    ),
    (
        "`torch.func.functional_call` with local shards or DTensors",
        RIGHT,
        "module/test_view_class.py::test_functional_call",
    ),
    ("`parametrize` before the bridge", RIGHT, "module/test_view_class.py::test_weight_norm_and_parametrize"),
    (
        "`parametrize`, `weight_norm`, `prune` on a bridged module",
        "refused: `RuntimeError`, `ValueError`",
        "module/test_view_class.py::test_weight_norm_and_parametrize",
    ),
    (
        "`weight_norm` of a DTensor that trains, also the deprecated one",
        "refused: `module-not-shardable`",
        "module/test_view_class.py::test_weight_norm_and_parametrize",
    ),
    ("LoRA around a bridged module, merging into it", RIGHT, "module/test_view_class.py::test_lora_wrapping"),
    (
        "two losses of one forward, second derivatives",
        RIGHT,
        "module/test_view.py::test_two_losses_of_one_forward_and_second_derivatives",
    ),
    (
        "an optimizer step between forward and backward",
        "refused: `RuntimeError`",
        "module/test_view.py::test_a_step_between_forward_and_backward_raises",
    ),
    (
        "optimizers built before the bridge, re-pointed",
        RIGHT,
        "optim/test_repoint.py::test_repointed_in_the_middle_of_training",
    ),
    (
        "optimizers built before the bridge, forgotten",
        "refused: `parameter-replaced`",
        "optim/test_repoint.py::test_a_forgotten_optimizer_raises_instead_of_standing_still",
    ),
    (
        "LBFGS, Adafactor, Muon and other optimizers that need full matrices, on shards",
        "refused: `not-elementwise`",
        "optim/test_elementwise.py::test_full_matrix_optimizers_raise_at_their_first_step",
    ),
    (
        "elementwise optimizers of torch and of others",
        RIGHT,
        "optim/test_elementwise.py::test_elementwise_optimizers_step_and_draw_nothing",
    ),
    (
        "`ZeroRedundancyOptimizer` over tensor-parallel ranks",
        "refused: `mesh-mismatch`",
        "optim/test_elementwise.py::test_zero_over_tensor_parallel_ranks_raises_at_its_first_step",
    ),
    ("clipping by 1-, 2-, p- and infinity norm", RIGHT, "optim/test_norms.py::test_clip_is_that_of_one_process"),
    (
        "state dicts: full tensors or DTensors of any placement in, `assign=True`",
        RIGHT,
        "module/test_loading.py::test_in_from_everything",
    ),
    (
        "a state dict of one rank's shards",
        "refused: `size mismatch`",
        "module/test_loading.py::test_wrong_shapes_are_named_and_change_nothing",
    ),
    (
        "checkpoint at 2x2, loaded at 1x4, 4x1, 1x1 with Adam's state, bit for bit",
        RIGHT,
        "optim/test_state.py::test_written_at_2x2_and_read_on_every_mesh",
    ),
    (
        "optimizer state of parameters that were never used",
        RIGHT,
        "optim/test_state.py::test_parameters_that_were_never_used",
    ),
    (
        "optimizer state of fused and kv-copied weights (tp-styles), from any mesh to any",
        RIGHT,
        "optim/test_sections.py::test_adam_goes_through_a_checkpoint_to_every_mesh",
    ),
    (
        "`get_model_state_dict`, `set_model_state_dict`",
        RIGHT,
        "optim/test_state.py::test_torchs_own_checkpoint_functions",
    ),
    (
        "a data-parallel group that mixes with tensor parallelism",
        "refused: `mesh-mismatch`",
        "test_api.py::test_arguments_that_do_not_fit",
    ),
    (
        "plain `DistributedDataParallel` or `replicate` over tensor-parallel ranks",
        "refused: `mesh-mismatch`",
        "test_ddp.py::test_plain_ddp_over_tensor_parallel_ranks_raises_before_it_broadcasts",
    ),
    (
        "parameters that are thawed, added or replaced after DDP was made",
        "refused: `parameter-replaced`",
        "test_ddp.py::test_parameters_that_ddp_does_not_reduce_are_refused",
    ),
    (
        "parameters of DDP that are frozen and thawed, with `find_unused_parameters`",
        RIGHT,
        "test_ddp.py::test_parameters_that_ddp_reduces_may_be_frozen_and_thawed",
    ),
    (
        "one rank whose module is unlike the others'",
        "refused: `ranks-disagree`, on all ranks",
        "test_api.py::test_a_problem_of_one_rank_raises_on_all",
    ),
    (
        "replicas that differ at the first forward",
        "refused: `replicas-differ`, on all ranks",
        "test_ddp.py::test_the_first_forward_compares_all_ranks",
    ),
    (
        "ranks that hold different shards, or drifted replicas",
        "refused: `ranks-disagree`, `replicas-differ`",
        "test_api.py::test_ranks_that_hold_different_shards_are_found_before_the_broadcast",
    ),
    (
        "a module that torch's own transform went over",
        "refused: `unsupported-wrapper`",
        "test_api.py::test_torchs_own_transform_is_refused",
    ),
    (
        "parameters that are local shards already (fused and kv-copied weights of tp-styles)",
        RIGHT,
        "test_layout.py::test_local_parameters_of_others_train_beside_leaves",
    ),
]

PAGE = Path(__file__).parent.parent / "SUPPORT.md"


def table() -> str:
    """Return the tables in Markdown: what is right, and what is refused."""
    lines = [
        "# What tp-ddp-bridge supports and refuses",
        "",
        "Written by `tests/support.py`; each row names its test.",
        "",
    ]
    for title, rows in (
        ("Supported", [row for row in ROWS if row[1] == RIGHT]),
        ("Refused", [row for row in ROWS if row[1] != RIGHT]),
    ):
        third = "" if title == "Supported" else " error |"
        lines += [f"## {title}", "", f"| what |{third} shown by |", "|---|---|" + ("---|" if third else "")]
        for what, outcome, test in rows:
            error = f" {outcome.removeprefix('refused: ')} |" if third else ""
            lines.append(f"| {what} |{error} `{test}` |")
        lines.append("")
    return "\n".join(lines)


def tests_of(folder: Path) -> set[str]:
    """Return every test function of every module, as ``file::name``."""
    return {
        f"{path.relative_to(folder)}::{node.name}"
        for path in folder.rglob("test_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


if __name__ == "__main__":
    PAGE.write_text(table())
