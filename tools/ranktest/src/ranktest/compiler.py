"""Work of `torch.compile` that a process does once, for test modules to do before their ranks are forked."""

from __future__ import annotations

import warnings

import torch
from torch import nn


def warm_up_compiler() -> None:
    """Trace a small step, forward and backward: the first one of a process costs 4 to 5 s of a core.

    A test module whose bodies compile says `from ranktest import warm_up_compiler as before_ranks`. A build with CUDA
    skips it: a backward starts autograd's threads for each GPU there, and a process with threads cannot be forked.
    """
    if torch.version.cuda is not None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = nn.Linear(2, 2)
        compiled = torch.compile(lambda x: layer(x).sum(), backend="aot_eager")
        compiled(torch.ones(2, 2, requires_grad=True)).backward()
        torch.compiler.reset()
