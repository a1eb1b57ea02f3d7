"""Mutations of tp-ddp-bridge, each a way to lose something silently; `tools/mutate.py bridge` tries them."""

from __future__ import annotations

from dataclasses import dataclass


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
        "module/view.py",
        "            dtensor: Any = view.read(value)\n",
        "            if torch._C._current_graph_task_id() != -1:  # backward: a block is recomputed\n"
        "                return value\n"
        "            dtensor: Any = view.read(value)\n",
        "test_ddp.py::test_activation_checkpointing",
    ),
    Mutation(
        "local tensors outside of a forward",
        "module/view.py",
        "    if _forward.views is None and dtensor is not value and",
        "    if _forward.views is None:\n        return value\n    if",
        "module/test_transform.py::test_parameters_are_leaves_and_attributes_are_dtensors",
    ),
    Mutation(
        "localise only the first name of a tie",
        "module/transform.py",
        "    for owner, name, _ in surveyed.registrations:\n",
        "    for owner, name, _ in surveyed.registrations[:1]:\n",
        "module/test_transform.py::test_ties_frozen_integers_and_attributes",
    ),
    Mutation(
        "force requires_grad",
        "module/transform.py",
        "nn.Parameter(leaf, requires_grad=tensor.requires_grad)",
        "nn.Parameter(leaf, requires_grad=leaf.is_floating_point())",
        "module/test_transform.py::test_undo_gives_back_what_there_was",
    ),
    Mutation(
        "a new Parameter per forward",
        "module/view.py",
        "        _forward.views = {}\n",
        "        for name in self._bridge.views:\n"
        "            self._parameters[name] = nn.Parameter(self._parameters[name].detach())\n"
        "        for module in self.children():\n"
        "            for name in views_of(module):\n"
        "                module._parameters[name] = nn.Parameter(module._parameters[name].detach())\n"
        "        _forward.views = {}\n",
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
        "module/view.py",
        "    except AttributeError as error:\n",
        "    except ZeroDivisionError as error:\n",
        "module/test_view_class.py::test_an_attribute_error_inside_the_view_is_not_swallowed",
    ),
    Mutation(
        "a forgotten optimizer left standing still",
        "module/transform.py",
        "        refuse_gradients(tensor, surveyed.name)\n",
        "        tensor.__class__ = torch.distributed.tensor.DTensor\n"
        "        refuse_gradients(tensor, surveyed.name)\n",
        "optim/test_repoint.py::test_a_forgotten_optimizer_raises_instead_of_standing_still",
    ),
    Mutation(
        "optimizer state left behind",
        "optim/state.py",
        "        optimizer.state[target] = state\n",
        "        optimizer.state[target] = {}\n",
        "optim/test_repoint.py::test_repointed_in_the_middle_of_training",
    ),
    Mutation(
        "one rank's part saved as the whole",
        "module/view.py",
        "view.read(saved) if keep_vars else view.layout.wrap(saved)",
        "saved",
        "module/test_loading.py::test_out_without_communication",
    ),
    Mutation(
        "one rank's part loaded as the whole",
        "module/loading.py",
        "        if value.shape != layout.shape:\n",
        "        if value.shape == local_shape and not isinstance(value, DTensor):\n"
        "            return value\n"
        "        if value.shape != layout.shape:\n",
        "module/test_loading.py::test_wrong_shapes_are_named_and_change_nothing",
    ),
    Mutation(
        "no look at what ranks hold before the broadcast",
        "api.py",
        '    raise_on_all_ranks(scope, "wrap_ddp", shard_problems(module, data_group))\n',
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
        "        if present != version:\n",
        "        if False:\n",
        "module/test_view.py::test_a_step_between_forward_and_backward_raises",
    ),
    Mutation(
        "ties undone by load_state_dict(assign=True)",
        "module/loading.py",
        "            self.module._parameters.update({name: cast(nn.Parameter, tied)})",
        "            pass",
        "module/test_loading.py::test_assign_keeps_ties_and_meta_models_can_be_filled",
    ),
    Mutation(
        "one rank's optimizer state saved as the whole",
        "optim/state.py",
        "    return SectionedTensor.of(value, layout) if layout.sections else layout.wrap(value)",
        "    return value",
        "optim/test_state.py::test_optimizer_state_of_one_device_and_of_other_kinds",
    ),
    Mutation(
        "hooks of users not tried",
        "ddp.py",
        '        raise_on_all_ranks(scope, "register_comm_hook", _trial_problems(self, hook, state))\n',
        "",
        "test_ddp.py::test_hooks_of_users_are_tried_when_they_are_registered",
    ),
    Mutation(
        "gradients of replicated parameters not compared",
        "optim/elementwise.py",
        "        _compare_replicated_gradients(parameters)\n",
        "        pass\n",
        "optim/test_elementwise.py::test_gradients_that_are_scaled_by_one_ranks_shards_raise_at_the_step",
    ),
    Mutation(
        "full parameters in the place of leaves",
        "module/transform.py",
        "LeafTable(submodule._parameters)",
        "dict(submodule._parameters)",
        "module/test_transform.py::test_full_parameters_are_refused_in_the_place_of_leaves",
    ),
    Mutation(
        "a verdict of the tensor-parallel group alone",
        "consistency/replicas.py",
        "    for where in scope:\n",
        "    for where in scope[-1:]:\n",
        "consistency/test_raise_together.py",
    ),
    Mutation(
        "a parameter that was thawed after wrapping",
        "ddp.py",
        "trains != accepted[1] or ",
        "",
        "test_ddp.py::test_parameters_that_ddp_does_not_reduce_are_refused",
    ),
    Mutation(
        "a parameter that was replaced after wrapping",
        "ddp.py",
        " or not all(map(operator.is_, parameters, accepted[0]))",
        "",
        "test_ddp.py::test_parameters_that_ddp_does_not_reduce_are_refused",
    ),
    Mutation(
        "a leaf whose place weight_norm takes",
        "module/view.py",
        "        if isinstance(self[name], nn.Parameter) and type(bridge_tag(self[name])) is Layout:\n",
        "        if False:\n",
        "module/test_view_class.py::test_weight_norm_and_parametrize",
    ),
    Mutation(
        "functions that take a leaf for the full parameter",
        "_shared/shard_values.py",
        "        for shard in shards if func in FULL_READS else ():\n",
        "        for shard in ():\n",
        "module/test_transform.py::test_functions_that_take_a_leaf_for_the_full_weight_are_refused",
    ),
    Mutation(
        "results of a leaf that are shards too",
        "_shared/shard_values.py",
        "    value, dims = result.as_subclass(ShardValue),",
        "    return result\n    value, dims = result.as_subclass(ShardValue),",
        "module/test_transform.py::test_functions_that_take_a_leaf_for_the_full_weight_are_refused",
    ),
    Mutation(
        "leaves of a class without multi-tensor kernels in a step",
        "layout.py",
        " = nn.Parameter if type(leaf) is ShardedLeaf else torch.Tensor",
        " = type(leaf)",
        "module/test_transform.py::test_leaves_are_ordinary_parameters_in_a_step_alone",
    ),
    Mutation(
        "leaves that stay ordinary parameters after a step",
        "optim/elementwise.py",
        "        refuse_full_reads(leaf)\n",
        "        pass\n",
        "module/test_transform.py::test_leaves_are_ordinary_parameters_in_a_step_alone",
    ),
    Mutation(
        "hooks on a view that vanish with it",
        "module/view.py",
        "    register_post_accumulate_grad_hook = register_hook\n",
        "",
        "module/test_eager.py::test_hooks_registered_through_an_attribute",
    ),
    Mutation(
        "post-accumulate hooks left on the replaced parameter",
        "module/view.py",
        "if getattr(tensor, POST_ACCUMULATE_HOOKS) or (",
        "if (",
        "module/test_eager.py::test_users_hooks_see_dtensors_before_under_and_after",
    ),
    Mutation(
        "a module that torch's own transform went over",
        "module/transform.py",
        "if not is_bridged and torch_bridged(submodule):",
        "if False:",
        "test_api.py::test_torchs_own_transform_is_refused",
    ),
    Mutation(
        "a first state that moves the parameters",
        "optim/state.py",
        "nn.Parameter(torch.zeros_like(parameter))",
        "parameter",
        "optim/test_state.py",
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
        "    check_steps()\n",
        "",
        "optim/test_elementwise.py::test_full_matrix_optimizers_raise_at_their_first_step",
    ),
    Mutation(
        "a subclass with a step of its own taken for torch's",
        "_shared/elementwise.py",
        " and inspect.unwrap(kind.step) is step for",
        " for",
        "optim/test_elementwise.py::test_full_matrix_optimizers_raise_at_their_first_step",
    ),
    Mutation(
        "copies of key-value heads counted each",
        "_shared/norms.py",
        "        if rank % section.copies == 0:\n",
        "        if True:\n",
        "optim/test_sections.py::test_adam_goes_through_a_checkpoint_to_every_mesh",
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
        '    raise_on_all_ranks(scope, "wrap_ddp", differences)\n',
        "",
        "test_api.py::test_ranks_that_hold_different_shards_are_found_before_the_broadcast",
    ),
]
