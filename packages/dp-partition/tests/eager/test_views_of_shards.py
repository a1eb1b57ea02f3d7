"""A view of a parameter or of its state, which a call keeps, returns or writes, is as on one device or refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import dp_partition as dp
import pytest
import torch
from dp_models import warm_up as before_ranks  # noqa: F401  # ranktest calls it
from dp_partition.runtime.gathered import copies
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import DTensor

VIEWS: dict[str, Callable[[Any], Any]] = {  # of a matrix of 10 x 6
    "itself": lambda w: w,
    "detached": lambda w: w.detach(),
    "data": lambda w: w.data,
    "row": lambda w: w[3],
    "row of data": lambda w: w.data[3],
    "data of a row": lambda w: w[3].data,
    "detached row": lambda w: w[3].detach(),
    "slice of a slice": lambda w: w[1:8][2:4],
    "element": lambda w: w[0, 0],
    "column": lambda w: w[:, 1],
    "diagonal": lambda w: w.diagonal(),
    "chunk": lambda w: w.detach().chunk(2)[1],
    "split": lambda w: w.detach().split(3)[1],
    "unbound": lambda w: w.detach().t().unbind()[2],
    "viewed as": lambda w: w[3].view_as(torch.empty(2, 3)),
}
# Each view is taken in front of the update of a call. It is read or written behind that update, in the next call or
# between calls; or it is returned, and read or written behind the call.
USES = [
    *("read in the call", "read in the next call", "read behind the call", "read behind the next call"),
    *("returned", "returned and read later", "written in the call", "written behind the call", "returned and written"),
]
SOURCES: dict[str, Callable[[Any, Any], Any]] = {
    "parameter": lambda model, optim: model[0].weight,
    "state": lambda model, optim: optim.state[model[0].weight]["momentum_buffer"],
}


def values(x: Any) -> torch.Tensor:
    full: torch.Tensor = x.full_tensor() if isinstance(x, DTensor) else x
    return full.detach().clone()


class Session:
    """Seven calls of a train step, one of which takes views. ``seen`` has what a user sees of each, or the refusal."""

    def __init__(self, source: str, use: str, at: int, left_out: set[str]) -> None:
        self.source, self.use, self.at, self.left_out = source, use, at, left_out
        self.seen: dict[str, Any] = {}
        self.taken: dict[str, Any] = {}

    def look(self, use: str, views: dict[str, Any]) -> None:
        """Read or write each view, if this is the place for it."""
        for name in views.keys() - self.left_out if use == self.use else ():
            try:
                if "written" in use:
                    with torch.no_grad():
                        views[name].mul_(0.5)
                else:
                    self.seen[name] = values(views[name])
            except dp.PlanError as error:
                self.seen[name] = str(error)

    def train(self, model: Any, optim: Any, x: torch.Tensor, call: int) -> Any:
        model(x).square().mean().backward()
        if call == self.at:
            source = SOURCES[self.source](model, optim)
            self.taken.update({name: view(source) for name, view in VIEWS.items()})
        optim.step()
        optim.zero_grad()
        if call == self.at:
            self.look("read in the call", self.taken)
            self.look("written in the call", self.taken)
            return dict(self.taken) if self.use.startswith("returned") else None
        if call == self.at + 1:
            self.look("read in the next call", self.taken)
        return None

    def run(self, door: Callable[[Any], Any], rows: slice) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 1)).double()
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = door(self.train)
        for call in range(1, 8):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(call), dtype=torch.float64)
            result = step(model, optim, x[rows], call)
            if call == self.at:
                returned = result
                self.look("read behind the call", self.taken)
                self.look("written behind the call", self.taken)
                self.look("returned", returned)
                self.look("returned and written", returned)
                self.taken = {} if self.use.startswith("returned") else self.taken
            if call == self.at + 1:
                self.look("read behind the next call", self.taken)
                self.look("returned and read later", returned)
        self.taken.clear()
        return list(map(values, model.parameters()))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("style", ["fully_shard", "replicate"])
def test_a_view_is_as_on_one_device(ranks: Ranks, style: Any) -> None:
    """Such a view held the values in front of the update, and a write to one between calls was lost."""
    warnings.simplefilter("ignore")
    rows = slice(4 * ranks.rank, 4 * ranks.rank + 4)
    for source, at in (("parameter", 1), ("parameter", 5), ("state", 5)):
        for use in USES:
            ours = Session(source, use, at, set())
            got = ours.run(lambda f: dp.distribute(f, mesh=ranks.mesh((2,), ("dp",)), style=style, check="never"), rows)
            refused = {name: seen for name, seen in ours.seen.items() if isinstance(seen, str)}
            alone = Session(source, use, at, set(refused))
            wanted = alone.run(lambda function: function, slice(None))
            seen = {name: value for name, value in ours.seen.items() if name not in refused}
            torch.testing.assert_close((seen, got), (alone.seen, wanted), rtol=1e-9, atol=1e-12, msg=f"{use} {at}")
            assert all("view of shards" in text and "test_views_of_shards.py:" in text for text in refused.values())
            if at == 1 or style == "replicate" or use in USES[:2] or use == "returned":
                assert not refused, (use, at)
            else:  # between calls a rank may be alone, and gathers nothing; a column, say, lies in the shard's memory
                assert len(refused) == (len(VIEWS) if "returned" in use else 10), (use, at, *refused)
    assert not copies  # each is freed with its last view
