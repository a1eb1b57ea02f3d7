"""What people look at: the page, the printed graph, the explanation of a parameter."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import dp_models as models
import dp_partition as dp
import pytest
import torch
from dp_partition._shared.page import human_bytes
from dp_partition.analysis.formatting import human_seconds
from dp_partition.analysis.pictures import ticks
from ranktest import Ranks

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page(HTMLParser):
    """Checks nesting and collects what a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[Any] = []
        self.ids: set[Any] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for key, value in attrs if key in ("src", "href", "xlink:href")]
        self.ids.add(dict(attrs).get("id"))
        if tag in ("svg", "title", "table", "div", "p", "code", "rect", "text"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("svg", "title", "table", "div", "p", "code", "rect", "text"):
            assert self.open.pop() == tag


def loads_nothing(text: str) -> set[Any]:
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.links == []
    assert "http" not in text
    assert "<script" not in text
    assert "@import" not in text
    assert "url(" not in text
    return page.ids


def estimated(**settings: Any) -> dp.Estimate:
    with torch.device("meta"):
        model = models.GPT(tied=True)
    model.positions.weight.requires_grad_(False)
    optim = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
    ids = torch.zeros(2, 8, dtype=torch.long, device="meta")
    return dp.estimate(models.token_step, model, optim, (ids, ids), style="default", **settings)


def test_the_page_shows_everything_and_loads_nothing(tmp_path: Path) -> None:
    found = estimated(world=4, bucket_mb=0.002)
    found.report(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert loads_nothing(text) >= {"timeline", "memory", "placements"}
    for message in found.messages:
        assert f"{message.kind} of {human_bytes(message.whole_bytes)}" in text
        assert f'<td class="n">{message.sent_bytes:,}</td>' in text
    rows = re.findall(r"<tr><td><code>([^<]*)</code>", text)
    assert rows == [param.info.name for param in found.plan.params]
    assert human_bytes(found.peak_bytes) in text
    assert "also head.weight" in text
    assert "frozen" in text


@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
def test_a_browser_draws_the_page(tmp_path: Path) -> None:
    assert BROWSER is not None
    path, picture = tmp_path / "page.html", tmp_path / "page.png"
    estimated(world=4).report(path)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1180,1400", f"--user-data-dir={tmp_path}/u"]
    command = [BROWSER, *flags, f"--screenshot={picture}", path.as_uri()]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert picture.stat().st_size > 20_000, "a blank page is smaller"


@pytest.mark.ranks(2)
def test_a_step_tells_what_it_does(ranks: Ranks, tmp_path: Path) -> None:
    model = models.seeded(models.mlp).to(ranks.device)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    step = dp.compile(models.mean_step, mesh=ranks.mesh((2,), ("dp",)), style="fully_shard")
    with pytest.raises(dp.PlanError, match="not-sharded"):
        step.report(tmp_path / "page.html")
    step(model, optim, torch.ones(4, 8, device=ranks.device))
    lines = str(step.graph).splitlines()
    (line,) = [one for one in lines if one.startswith("param_0_weight ")]
    assert re.split(r"\s{2,}", line) == ["param_0_weight", "PARAM", "f32[8, 8]", "input: param_0.weight"]
    assert [one for one in lines if one.startswith("#")] == ["# inputs", "# forward", "# backward", "# optimizer"]
    assert sum("SEND" in one for one in lines) == 2
    assert sum("# gradient of 2.weight" in one for one in lines) == 1
    assert len([one for one in lines if not one.startswith(("#", "node ", "----"))]) == len(step.graph.graph.nodes)
    told = step.explain("2.weight")
    assert "all_gather 0 of 2 in forward" in told
    assert "reduce_scatter 1 of 2 in backward" in told
    step.report(tmp_path / f"page{ranks.rank}.html", link=dp.Link(125e6, 1e-6))
    text = (tmp_path / f"page{ranks.rank}.html").read_text()
    loads_nothing(text)
    assert f"numbers are of rank {ranks.rank}" in text


def test_numbers_for_people() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1536, 5 << 30)] == ["0 B", "1023 B", "1.50 KiB", "5.00 GiB"]
    assert [human_seconds(s) for s in (2, 0.0015, 2e-6)] == ["2.00 s", "1.50 ms", "2.0 us"]
    for most in (0.7, 1, 3.2, 9.9, 47, 850, 12345):
        found = ticks(most)
        assert 4 <= len(found) <= 12, (most, found)
        assert found[-1] <= most < found[-1] + 2 * (found[1] - found[0])
