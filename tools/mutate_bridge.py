"""Try mutations of tp-ddp-bridge: each is a way to lose something silently, and each must fail a test.

    python tools/mutate_bridge.py                     all of them
    python tools/mutate_bridge.py NAME ...            some
    python tools/mutate_bridge.py --page FILE         and write what became of them
                                                      (docs/benchmarks/tp-ddp-bridge-mutations.md)

The package and its tests are copied once, so editing them meanwhile disturbs nothing. The named tests must pass on the
copy as it is; then each mutation edits a fresh copy, which comes first on the path, and its tests must fail. Exit 0:
every mutation was killed. Exit 1: one survived, no longer fits the source, or the tests failed without any.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import mutations
from mutations import Outcome

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "packages" / "tp-ddp-bridge"


@dataclass(frozen=True)
class Mutation:
    """One edit of one file and the tests that have to notice it."""

    name: str
    file: str
    old: str
    new: str
    tests: str


MUTATIONS = [
    Mutation(
        "restore local tensors after forward",
        "module/view_class.py",
        "        return view.read(value) if in_forward() else",
        "        if torch._C._current_graph_task_id() != -1:  # backward, where a checkpointed block is recomputed\n"
        "            return value\n"
        "        return view.read(value) if in_forward() else",
        "test_ddp.py::test_activation_checkpointing",
    ),
    Mutation(
        "local tensors outside of a forward",
        "module/view_class.py",
        "eager_view(view.read(value), value, view.layout)\n",
        "value\n",
        "module/test_transform.py::test_parameters_are_leaves_and_attributes_are_dtensors",
    ),
    Mutation(
        "localise only the first name of a tie",
        "module/transform.py",
        "    for registration in surveyed.registrations:\n        _register(registration, surveyed.kind, leaf)\n",
        "    for registration in surveyed.registrations[:1]:\n        _register(registration, surveyed.kind, leaf)\n",
        "module/test_transform.py::test_ties_frozen_integers_and_attributes",
    ),
    Mutation(
        "force requires_grad",
        "module/transform.py",
        "nn.Parameter(local, requires_grad=tensor.requires_grad)",
        "nn.Parameter(local, requires_grad=local.is_floating_point())",
        "module/test_transform.py::test_undo_gives_back_what_there_was",
    ),
    Mutation(
        "a new Parameter per forward",
        "module/view_class.py",
        "        with _scope:\n",
        "        for name in self._dp_views:\n"
        "            self._parameters[name] = nn.Parameter(self._parameters[name].detach())\n"
        "        for module in self.children():\n"
        "            for name in getattr(module, '_dp_views', {}):\n"
        "                module._parameters[name] = nn.Parameter(module._parameters[name].detach())\n"
        "        with _scope:\n",
        "test_ddp.py::test_options",
    ),
    Mutation(
        "count replicated gradients tp times",
        "_shared/norms.py",
        " if is_first else []",
        "",
        "optim/test_norms.py",
    ),
    Mutation(
        "a DTensor kept across grad modes",
        "module/view.py",
        "            torch.is_grad_enabled(),\n",
        "            True,\n",
        "module/test_view.py::test_a_view_belongs_to_its_grad_mode",
    ),
    Mutation(
        "a view kept across a checkpointed region",
        "module/view.py",
        "            top_saved_tensors_hooks(),",
        "            None,",
        "module/test_view.py::test_views_do_not_cross_a_checkpointed_region",
    ),
    Mutation(
        "gradients left as they lie",
        "module/view.py",
        "        if grad.placements != spec.placements:\n",
        "        if False:\n",
        "test_ddp.py::test_sequence_and_loss_parallel",
    ),
    Mutation(
        "an AttributeError let out of the view",
        "module/view_class.py",
        "    except AttributeError as error:\n",
        "    except ZeroDivisionError as error:\n",
        "module/test_view_class.py::test_an_attribute_error_inside_the_view_is_not_swallowed",
    ),
    Mutation(
        "a forgotten optimizer left standing still",
        "module/transform.py",
        "            leaf,\n        )\n        refuse_gradients",
        "            leaf,\n        )\n        tensor.__class__ = DTensor\n        refuse_gradients",
        "optim/test_repoint.py::test_a_forgotten_optimizer_raises_instead_of_standing_still",
    ),
    Mutation(
        "optimizer state left behind",
        "optim/repoint.py",
        "        optimizer.state[target] = state\n",
        "        optimizer.state[target] = {}\n",
        "optim/test_repoint.py::test_repointed_in_the_middle_of_training",
    ),
    Mutation(
        "one rank's part saved as the whole",
        "module/view_class.py",
        "view.read(saved) if keep_vars else view.layout.wrap(saved)",
        "saved",
        "state_dict/test_loading.py::test_out_without_communication",
    ),
    Mutation(
        "one rank's part loaded as the whole",
        "state_dict/loading.py",
        "        if value.shape != layout.shape:\n",
        "        if value.shape == view.local_shape and not isinstance(value, DTensor):\n"
        "            return value\n"
        "        if value.shape != layout.shape:\n",
        "state_dict/test_loading.py::test_wrong_shapes_are_named_and_change_nothing",
    ),
    Mutation(
        "no look at what ranks hold before the broadcast",
        "api.py",
        '    jury.agree("wrap_ddp", shard_problems(module, data_group))\n',
        "",
        "test_api.py::test_ranks_that_hold_different_shards_are_found_before_the_broadcast",
    ),
    Mutation(
        "torch's hooks on the default group",
        "ddp.py",
        "            state = self.process_group\n",
        "            pass\n",
        "test_ddp.py::test_communication_hooks",
    ),
    Mutation(
        "a tied leaf counted once for each name",
        "_shared/norms.py",
        "    return list({id(parameter): parameter for parameter in listed}.values())\n",
        "    return list(listed)\n",
        "optim/test_norms.py::test_replicated_tied_and_empty_shards_count_right",
    ),
    Mutation(
        "each rank clips by the norm of its own shards",
        "_shared/norms.py",
        "                    dist.all_reduce(total, op=op, group=group)\n",
        "                    pass\n",
        "optim/test_norms.py::test_clip_is_that_of_one_process",
    ),
    Mutation(
        "each rank skips a scaled step by its own shards",
        "optim/scaler.py",
        "                dist.all_reduce(verdict, op=dist.ReduceOp.MAX, group=group)\n",
        "                pass\n",
        "optim/test_scaler.py::test_ranks_skip_a_step_together",
    ),
    Mutation(
        "an optimizer step between forward and backward goes unseen",
        "module/view.py",
        "        if leaf._version != version:\n",
        "        if False:\n",
        "module/test_view.py::test_a_step_between_forward_and_backward_raises",
    ),
    Mutation(
        "ties undone by load_state_dict(assign=True)",
        "state_dict/loading.py",
        "            self.module._parameters[name] = tied\n",
        "            pass\n",
        "state_dict/test_loading.py::test_assign_keeps_ties_and_meta_models_can_be_filled",
    ),
    Mutation(
        "one rank's optimizer state saved as the whole",
        "optim/state.py",
        "    return SectionedTensor.of(value, layout) if layout.sections else layout.wrap(value)",
        "    return value",
        "optim/test_state.py::test_optimizer_state_of_one_device_and_of_other_kinds",
    ),
    Mutation(
        "a verdict of the tensor-parallel group alone",
        "consistency/verdict.py",
        "        for step in self.steps:\n",
        "        for step in self.steps[-1:]:\n",
        "consistency/test_verdict.py",
    ),
    Mutation(
        "a parameter that was thawed after wrapping",
        "ddp.py",
        "return [parameter.requires_grad for parameter in self._parameters] == self._trains and all(",
        "return all(",
        "test_ddp.py::test_parameters_that_ddp_does_not_reduce_are_refused",
    ),
    Mutation(
        "plain DDP over tensor-parallel ranks",
        "ddp.py",
        '        raise_problems(_group_problems(child, parent.process_group), "DDP would mix shards")\n',
        "",
        "test_ddp.py::test_plain_ddp_over_tensor_parallel_ranks_raises_before_it_broadcasts",
    ),
    Mutation(
        "no comparison at the first forward",
        "ddp.py",
        "                self._compare_ranks(ddp)\n",
        "                pass\n",
        "test_ddp.py::test_the_first_forward_compares_all_ranks",
    ),
    Mutation(
        "optimizers not tried at their first step",
        "api.py",
        "    check_at_first_step()\n",
        "",
        "optim/test_elementwise.py::test_full_matrix_optimizers_raise_at_their_first_step",
    ),
    Mutation(
        "an optimizer tried for a few steps only",
        "_shared/elementwise.py",
        "STEPS = 12",
        "STEPS = 3",
        "optim/test_elementwise.py::test_full_matrix_optimizers_raise_at_their_first_step",
    ),
    Mutation(
        "copies of key-value heads counted each",
        "_shared/norms.py",
        "        if rank % section.copies == 0:\n",
        "        if True:\n",
        "state_dict/test_sections.py::test_adam_goes_through_a_checkpoint_to_every_mesh",
    ),
    Mutation(
        "state of a parameter that was never used",
        "optim/state.py",
        " and fqn not in without_state",
        "",
        "optim/test_state.py::test_parameters_that_were_never_used",
    ),
    Mutation(
        "plain parameters that differ between tensor-parallel ranks pass",
        "api.py",
        '    jury.agree("wrap_ddp", differences)\n',
        "",
        "test_api.py::test_ranks_that_hold_different_shards_are_found_before_the_broadcast",
    ),
]


BY_NAME = {mutation.name: mutation for mutation in MUTATIONS}


def snapshot(folder: Path) -> Path:
    """A copy of the package, its tests among it."""
    copy = folder / "package"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", ".*", "dist"))
    return copy


def tests_fail(package: Path, source: Path, tests: list[str]) -> tuple[int, str]:
    """Run ``tests`` of ``package`` on the sources in ``source``: pytest's exit code and output."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *(f"tests/{t}" for t in tests)]
    path = os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=package, env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def run(mutation: Mutation, package: Path) -> Outcome:
    """Apply ``mutation`` to a copy of the package's sources and run its tests."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        shutil.copytree(package / "src" / "tp_ddp_bridge", source / "tp_ddp_bridge")
        file = source / "tp_ddp_bridge" / mutation.file
        text = file.read_text()
        if text.count(mutation.old) != 1:
            return Outcome(mutation.name, f"does not fit: {text.count(mutation.old)} places in {mutation.file}")
        file.write_text(text.replace(mutation.old, mutation.new))
        code, output = tests_fail(package, source, [mutation.tests])
    if code == 0:
        return Outcome(mutation.name, "survived")
    if code != 1:
        return Outcome(mutation.name, f"pytest ended with {code}: {output[-300:]}")
    return Outcome(mutation.name, "killed", _last_words(output))


def _last_words(output: str) -> str:
    """The error of the first failing rank, in one line."""
    said = re.findall(r"^\s*(?:E\s+)?((?:[\w.]+Error|Failed|[\w.]+Exception)\b.*)$", output, re.MULTILINE)
    said = said or re.findall(r"^\s*E\s+(.+)$", output, re.MULTILINE)
    return str(said[0]).strip()[:110] if said else "the test failed"


def page(outcomes: dict[str, list[Outcome]]) -> list[str]:
    """The outcomes in Markdown."""
    killed = sum(outcome.result == "killed" for (outcome,) in outcomes.values())
    lines = [
        "# Mutations of tp-ddp-bridge",
        "",
        "Each line takes out one guard of the package, in a copy, and runs the test that has to notice. "
        f"{killed} of {len(outcomes)} were killed; without any mutation all of these tests passed in the same run.",
        "Repeat: `python tools/mutate_bridge.py --page docs/benchmarks/tp-ddp-bridge-mutations.md`.",
        "",
        "| mutation | in | test | outcome | how it ended |",
        "|---|---|---|---|---|",
    ]
    for name, (outcome,) in outcomes.items():
        mutation = BY_NAME[name]
        how = outcome.how.replace("|", "\\|").replace("`", "'")
        row = (name, f"`{mutation.file}`", f"`{mutation.tests}`", outcome.result, f"`{how}`" if how else "")
        lines.append(f"| {' | '.join(row)} |")
    return lines


def main() -> int:
    """Run the mutations and print what became of each."""
    with tempfile.TemporaryDirectory() as folder:
        package = snapshot(Path(folder))

        def prepare(chosen: list[str]) -> str:
            code, output = tests_fail(package, package / "src", sorted({BY_NAME[name].tests for name in chosen}))
            return output[-3000:] if code else ""

        return mutations.main(__doc__, BY_NAME, lambda name: [run(BY_NAME[name], package)], page, prepare)


if __name__ == "__main__":
    sys.exit(main())
