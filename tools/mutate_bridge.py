"""Try mutations of tp-ddp-bridge: each is a way to lose something silently, and each must fail a test.

    python tools/mutate_bridge.py               all of them
    python tools/mutate_bridge.py NAME ...      some

A mutation edits a copy of the package, never the package: the copy comes first on the path, and the tests named with
the mutation run against it. Exit 0: every mutation was killed. Exit 1: one survived, or no longer fits the source.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

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
        "view_class.py",
        "        return shown(view.read(value), value, view.layout)\n",
        "        return value\n",
        "test_matrix.py::test_activation_checkpointing",
    ),
    Mutation(
        "localise only the first name of a tie",
        "transform.py",
        "    for place in found.places:\n        _put(place, found.kind, leaf)\n",
        "    for place in found.places[:1]:\n        _put(place, found.kind, leaf)\n",
        "test_views.py::test_ties_frozen_integers_and_attributes",
    ),
    Mutation(
        "force requires_grad",
        "transform.py",
        "nn.Parameter(local, requires_grad=tensor.requires_grad)",
        "nn.Parameter(local, requires_grad=local.is_floating_point())",
        "test_views.py::test_undo_gives_back_what_there_was",
    ),
    Mutation(
        "a new Parameter per forward",
        "view_class.py",
        "        with _scope:\n",
        "        for name in self._dp_views:\n"
        "            self._parameters[name] = nn.Parameter(self._parameters[name].detach())\n"
        "        for module in self.children():\n"
        "            for name in getattr(module, '_dp_views', {}):\n"
        "                module._parameters[name] = nn.Parameter(module._parameters[name].detach())\n"
        "        with _scope:\n",
        "test_matrix.py::test_options",
    ),
    Mutation(
        "count replicated gradients tp times",
        "norms.py",
        "            if operation == dist.ReduceOp.SUM and dist.get_rank() != ranks[0]:\n",
        "            if False:\n",
        "test_norms.py",
    ),
    Mutation(
        "a DTensor kept across grad modes",
        "cache.py",
        "        grad_mode,\n        inference,\n",
        "        True,\n        inference,\n",
        "test_views.py::test_a_view_belongs_to_its_grad_mode",
    ),
    Mutation(
        "a view kept across a checkpointed region",
        "cache.py",
        "        inference,\n        region,\n",
        "        inference,\n        None,\n",
        "test_forward.py::test_views_do_not_cross_a_checkpointed_region",
    ),
    Mutation(
        "a spare taken from under a graph",
        "view.py",
        "            or holders(view) > 1\n",
        "",
        "test_forward.py::test_a_spare_view_is_as_good_as_a_new_one_or_not_used",
    ),
    Mutation(
        "a spare kept though the leaf's memory changed",
        "view.py",
        "            or not same_memory(leaf, view._local_tensor)\n",
        "",
        "test_forward.py::test_a_spare_view_is_as_good_as_a_new_one_or_not_used",
    ),
    Mutation(
        "gradients left as they lie",
        "view.py",
        "        if grad.placements != spec.placements:\n",
        "        if False:\n",
        "test_matrix.py::test_sequence_parallel",
    ),
    Mutation(
        "an AttributeError let out of the view",
        "view_class.py",
        "    except AttributeError as error:\n",
        "    except ZeroDivisionError as error:\n",
        "test_views.py::test_an_attribute_error_inside_the_view_is_not_swallowed",
    ),
    Mutation(
        "a forgotten optimizer left standing still",
        "transform.py",
        "            hand_over(tensor, leaf, found.name)\n",
        "            pass\n",
        "test_optimizers.py::test_a_forgotten_optimizer_raises_instead_of_standing_still",
    ),
    Mutation(
        "optimizer state left behind",
        "optimizers.py",
        "        optimizer.state[target] = state\n",
        "        optimizer.state[target] = {}\n",
        "test_optimizers.py::test_repointed_in_the_middle_of_training",
    ),
    Mutation(
        "one rank's part saved as the whole",
        "view_class.py",
        "view.read(saved) if keep_vars else view.layout.wrap(saved)",
        "saved",
        "test_state_dict.py::test_out_without_communication",
    ),
    Mutation(
        "one rank's part loaded as the whole",
        "loading.py",
        "        if value.shape != layout.shape:\n",
        "        if value.shape == view.local_shape and not isinstance(value, DTensor):\n"
        "            return value\n"
        "        if value.shape != layout.shape:\n",
        "test_state_dict.py::test_wrong_shapes_are_named_and_change_nothing",
    ),
    Mutation(
        "no look at what ranks hold before the broadcast",
        "wrap.py",
        "    check_same_shards(module, data_group)\n",
        "",
        "test_wrap.py::test_ranks_that_hold_different_shards_are_found_before_the_broadcast",
    ),
    Mutation(
        "torch's hooks on the default group",
        "ddp.py",
        "            state = self.process_group\n",
        "            pass\n",
        "test_matrix.py::test_communication_hooks",
    ),
]


def run(mutation: Mutation, folder: Path) -> str:
    """``killed``, ``survived``, or what is wrong with the mutation."""
    copy = folder / "tp_ddp_bridge"
    shutil.copytree(PACKAGE / "src" / "tp_ddp_bridge", copy, ignore=shutil.ignore_patterns("__pycache__"))
    file = copy / mutation.file
    text = file.read_text()
    if text.count(mutation.old) != 1:
        return f"does not fit: {text.count(mutation.old)} places in {mutation.file}"
    file.write_text(text.replace(mutation.old, mutation.new))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/{mutation.tests}"]
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, cwd=PACKAGE, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return "survived"
    return "killed" if done.returncode == 1 else f"pytest ended with {done.returncode}: {done.stdout[-300:]}"


def main() -> int:
    """Run the mutations and print what became of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    names = parser.parse_args().names
    unknown = set(names) - {mutation.name for mutation in MUTATIONS}
    if unknown:
        parser.error(f"no mutation {', '.join(sorted(unknown))}; there are: {'; '.join(m.name for m in MUTATIONS)}")
    outcomes = []
    for mutation in MUTATIONS:
        if names and mutation.name not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            outcome = run(mutation, Path(folder))
        print(f"{outcome:10} {mutation.name}", flush=True)
        outcomes.append(outcome)
    return 0 if all(outcome == "killed" for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
