"""The how-to on weight sync runs as it is printed; the generator's weights and logits are bit for bit the trainer's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ranktest import Ranks

PAGE = Path(__file__).parents[3] / "docs" / "howto" / "rl-weight-sync.md"


def before_ranks() -> None:
    """Import the models of the page once, in the process that ranks are forked from: it takes seconds in each."""
    from transformers import LlamaForCausalLM, Phi3ForCausalLM

    assert LlamaForCausalLM and Phi3ForCausalLM


@pytest.mark.extra("transformers")
@pytest.mark.filterwarnings("ignore")  # transformers and its models warn on their own account
@pytest.mark.ranks(4)
def test_the_generator_computes_what_the_trainer_computes(ranks: Ranks) -> None:
    blocks = re.findall(r"<!-- run: torchrun 4 -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, Any] = {}
    with ranks.record() as log:
        exec(compile("\n".join(blocks), str(PAGE), "exec"), names)
    plan = names["sync"].plan
    # One exchange for each sync, of exactly the bytes that are needed.
    assert log.count("all_to_all") == 3 * len(plan.buckets) == 3
    assert plan.wire_bytes == plan.lower_bound
    sent = sum(sum(event.bytes_sent) for event in log.events if event.op == "all_to_all")
    assert sum(ranks.gather(sent)) == 3 * plan.wire_bytes

    # The reference: the trainer's whole weights, cut with plain indexing, in the same generator.
    weights = {k: v.full_tensor().detach() for k, v in names["weights"].items()} if names["is_trainer"] else {}
    weights = ranks.gather(weights)[0]
    if names["is_trainer"]:
        return
    at, tp = ranks.rank - 2, 2
    reference = names["new_generator"]()
    compared = 0
    for name, parameter in names["live"].named_parameters():
        if name.endswith("qkv_proj.weight"):
            expected = torch.cat([weights[name.replace("qkv", k)].chunk(tp)[at] for k in "qkv"])
        elif name.endswith("gate_up_proj.weight"):
            expected = torch.cat([weights[name.replace("gate_up", k)].chunk(tp)[at] for k in ("gate", "up")])
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            expected = weights[name].chunk(tp, 1)[at]
        else:
            expected = weights[name]
        assert torch.equal(parameter, expected), name
        reference.get_parameter(name).copy_(expected)
        compared += parameter.numel()
    assert compared == sum(p.numel() for p in reference.parameters())
    assert torch.equal(names["live"](names["ids"]).logits, reference(names["ids"]).logits)
