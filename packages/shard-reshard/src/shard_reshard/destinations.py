"""Whether destination tensors can be written to without losing anything that is still to be read or kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shard_reshard._torch_compat import is_fake
from shard_reshard.problems import Problem
from shard_reshard.shared_memory import overlaps_itself, sharing


def destination_problems(
    outs: Sequence[torch.Tensor], names: Sequence[str], sources: Sequence[torch.Tensor], in_place: bool = True
) -> list[Problem]:
    """Why destination tensors cannot be filled.

    Args:
        outs: All destination tensors of this rank that are filled by one call.
        names: What each is called in messages.
        sources: All source tensors of the call.
        in_place: They are filled while sources are still read; False: at the end, by copies.
    """
    problems = []
    for tensor, name in zip(outs, names, strict=True):
        if overlaps_itself(tensor):
            hint = "an expanded tensor has one place for several elements; pass a tensor of its own"
            problems.append(Problem("out-overlaps", name, found=f"strides {tensor.stride()}", hint=hint))
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            hint = "write to it under torch.inference_mode(), or pass its clone()"
            problems.append(Problem("out-inference", name, found="a tensor made in inference mode", hint=hint))
        if in_place and (tensor.is_conj() or tensor.is_neg()):
            hint = "its memory holds other values than it shows; pass a tensor of its own"
            found = "a view that conjugates or negates on reading"
            problems.append(Problem("out-lazy-view", name, found=found, hint=hint))
        if tensor.requires_grad and torch.is_grad_enabled():
            # A leaf torch would refuse; another one would keep the graph of the values that it had.
            hint = "write into parameters under torch.no_grad(); pass the detach() of what was computed"
            found = f"a {'leaf' if tensor.is_leaf else 'result'} that requires grad"
            problems.append(Problem("out-requires-grad", name, found=found, hint=hint))
    if is_fake((*outs, *sources)) or problems:
        return problems
    for first, second in sharing(outs, sources if in_place else ()):
        if second < len(outs):
            found = f"memory of {names[first]}" if names[first] != names[second] else "memory of another one"
            hint = "two values cannot stay in one memory; leave one of them out (key_map={name: None}), or untie them"
            problems.append(Problem("out-shares-memory", names[second], found=found, hint=hint))
        else:
            hint = "the source is still read while out is written; pass other memory"
            problems.append(Problem("out-is-source", names[first], found="memory of a source", hint=hint))
    return list(dict.fromkeys(problems))
