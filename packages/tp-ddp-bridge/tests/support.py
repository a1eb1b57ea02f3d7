"""The support table of the README: what works, what is refused, and the test that shows it.

`python tests/support.py` writes the table into the README; a test compares them.
"""

from __future__ import annotations

import ast
from pathlib import Path

RIGHT = "right"

# what, how it comes out, the test that shows it
ROWS: list[tuple[str, str, str]] = [
    ("DDP with its defaults, MLP and transformer", RIGHT, "test_matrix.py::test_options"),
    (
        "`find_unused_parameters`, parameters that are never or sometimes used",
        RIGHT,
        "test_matrix.py::test_unused_parameters",
    ),
    ("`static_graph`", RIGHT, "test_matrix.py::test_transformer_options"),
    ("`gradient_as_bucket_view`, `batched_grad_copy`, tiny buckets", RIGHT, "test_matrix.py::test_options"),
    ("`no_sync()` accumulation; two forwards, one backward", RIGHT, "test_matrix.py::test_ways_to_step"),
    ("`join()` with uneven inputs", RIGHT, "test_matrix.py::test_join_with_uneven_inputs"),
    ("fp16, bf16 and PowerSGD hooks", RIGHT, "test_matrix.py::test_communication_hooks"),
    (
        "a hook state over other ranks than DDP's",
        "refused: `groups-mix`",
        "test_matrix.py::test_hooks_over_the_wrong_ranks_are_refused",
    ),
    ("`ZeroRedundancyOptimizer` built after the bridge", RIGHT, "test_matrix.py::test_zero_1"),
    (
        "`ZeroRedundancyOptimizer` given as `optimizers=`",
        "refused: `zero-optimizer`",
        "test_optimizers.py::test_zero_is_refused_by_name",
    ),
    ("activation checkpointing, reentrant and not", RIGHT, "test_matrix.py::test_activation_checkpointing"),
    ("autocast", RIGHT, "test_matrix.py::test_autocast"),
    (
        "float16 loss scaling with `tp_ddp_bridge.GradScaler`, fused optimizers too",
        RIGHT,
        "test_scaler.py::test_ranks_skip_a_step_together",
    ),
    ("`SequenceParallel`", RIGHT, "test_matrix.py::test_sequence_and_loss_parallel"),
    ("`loss_parallel`", RIGHT, "test_matrix.py::test_sequence_and_loss_parallel"),
    ("a `transformers` model", RIGHT, "test_matrix.py::test_a_transformers_model"),
    ("`torch.compile(fullgraph=True)` of the inner module", RIGHT, "test_forward.py::test_compiles_without_a_break"),
    ("3-D meshes: two data axes, two tensor axes", RIGHT, "test_wrap.py::test_three_axes"),
    (
        "tied, frozen and integer parameters, `ParameterList`, `ParameterDict`",
        RIGHT,
        "test_views.py::test_ties_frozen_integers_and_attributes",
    ),
    ("DTensor buffers", RIGHT, "test_views.py::test_buffers"),
    (
        "hooks on parameters, their handles",
        RIGHT,
        "test_views.py::test_users_hooks_see_dtensors_before_under_and_after",
    ),
    ("`deepcopy`, `pickle`, `torch.save` of the module", RIGHT, "test_views.py::test_copies_and_pickles_stay_bridged"),
    (
        "`.to()`, `zero_grad()`, evaluation before the first step",
        RIGHT,
        "test_views.py::test_to_and_zero_grad_and_eval",
    ),
    (
        "submodules called directly, writes in place through an attribute",
        RIGHT,
        "test_views.py::test_submodules_called_directly_and_writes_in_place",
    ),
    ("`torch.func.functional_call` with local parts or DTensors", RIGHT, "test_views.py::test_functional_call"),
    ("`parametrize` before the bridge", RIGHT, "test_views.py::test_weight_norm_and_parametrize"),
    (
        "`parametrize`, `weight_norm` on a bridged module",
        "refused: `RuntimeError`",
        "test_views.py::test_weight_norm_and_parametrize",
    ),
    ("LoRA around a bridged module, merging into it", RIGHT, "test_views.py::test_lora_wrapping"),
    (
        "two losses of one forward, second derivatives",
        RIGHT,
        "test_views.py::test_two_losses_of_one_forward_and_second_derivatives",
    ),
    (
        "an optimizer step between forward and backward",
        "refused: `RuntimeError`",
        "test_views.py::test_a_step_between_forward_and_backward_raises",
    ),
    (
        "optimizers built before the bridge, re-pointed",
        RIGHT,
        "test_optimizers.py::test_repointed_in_the_middle_of_training",
    ),
    (
        "optimizers built before the bridge, forgotten",
        "refused: `RuntimeError`",
        "test_optimizers.py::test_a_forgotten_optimizer_raises_instead_of_standing_still",
    ),
    (
        "LBFGS, Adafactor, Muon on shards",
        "refused: `not-elementwise`",
        "test_optimizers.py::test_optimizers_that_need_whole_matrices",
    ),
    ("clipping by 1-, 2-, p- and infinity norm", RIGHT, "test_norms.py::test_clip_is_that_of_one_process"),
    (
        "state dicts: full tensors or DTensors of any placement in, `assign=True`",
        RIGHT,
        "test_state_dict.py::test_in_from_everything",
    ),
    (
        "a state dict of one rank's parts",
        "refused: `size mismatch`",
        "test_state_dict.py::test_wrong_shapes_are_named_and_change_nothing",
    ),
    (
        "checkpoint at 2x2, loaded at 1x4, 4x1, 1x1 with Adam's state, bit for bit",
        RIGHT,
        "test_checkpoint.py::test_written_at_2x2_and_read_on_every_mesh",
    ),
    (
        "`get_model_state_dict`, `set_model_state_dict`",
        RIGHT,
        "test_checkpoint.py::test_torchs_own_checkpoint_functions",
    ),
    (
        "a data-parallel group that mixes with tensor parallelism",
        "refused: `groups-mix`",
        "test_wrap.py::test_arguments_that_do_not_fit",
    ),
    (
        "ranks that hold different shards, or drifted replicas",
        "refused: `ranks-disagree`, `replicas-differ`",
        "test_wrap.py::test_ranks_that_hold_different_shards_are_found_before_the_broadcast",
    ),
    (
        "a module that torch's own transform went over",
        "refused: `torch-bridge`",
        "test_wrap.py::test_torchs_own_transform_is_refused",
    ),
    (
        'parameters that are local shards already (tp-styles, `params="local"`)',
        RIGHT,
        "test_local.py::test_local_parameters_of_others_train_beside_leaves",
    ),
]

BEGIN = "<!-- support table: written by tests/support.py -->"
END = "<!-- end of the support table -->"


def table() -> str:
    """The table in Markdown."""
    lines = ["| what | comes out | shown by |", "|---|---|---|"]
    lines += [f"| {what} | {outcome} | `{test}` |" for what, outcome, test in ROWS]
    return "\n".join(lines)


def tests_of(folder: Path) -> set[str]:
    """Every test function of every module, as ``file::name``."""
    found = set()
    for path in folder.glob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found.add(f"{path.name}::{node.name}")
    return found


def replaced(text: str) -> str:
    """The README with the table as it should be."""
    start, end = text.index(BEGIN), text.index(END)
    return f"{text[:start]}{BEGIN}\n{table()}\n{text[end:]}"


if __name__ == "__main__":
    readme = Path(__file__).parent.parent / "README.md"
    readme.write_text(replaced(readme.read_text()))
