"""Notes on nodes: one list of them, and a copy of a node has its own."""

from __future__ import annotations

import re
from pathlib import Path

import dp_partition
from dp_partition.nodes import copy_notes, kind_of, meta_of
from torch import fx

TORCHS = {"val", "tensor_meta"}


def test_only_the_typed_list_names_notes() -> None:
    named = re.compile(r'\.meta(?:\.\w+\(|\[)"(\w+)"|"(\w+)" (?:not )?in \w+\.meta\b|\.meta\.update\((\w+)=')
    paths = list(Path(dp_partition.__file__).parent.rglob("*.py"))
    keys = {key for path in paths for pair in named.findall(path.read_text()) for key in pair if key}
    assert len(paths) > 40 and keys == TORCHS


def test_a_copy_has_notes_of_its_own() -> None:
    graph = fx.Graph()
    one = graph.placeholder("one")
    meta_of(one).update({"phase": "forward", "gradient": "weight"})
    other = graph.node_copy(one)
    meta_of(other)["phase"] = "backward"
    assert meta_of(one) == {"phase": "forward", "gradient": "weight"}
    copy_notes(other, one, "phase", "node_type")
    assert meta_of(one) == {"phase": "backward", "gradient": "weight"}
    assert kind_of(one) == ""
