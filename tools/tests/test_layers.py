"""Each contract of import-linter is broken by a copy with its mistake."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import layers
import repo

PLANTED = {
    "shard_spec/_torch_compat.py": "def late():\n    from shard_spec import cli\n",  # upwards
    "tp_styles/stray.py": "",  # in no layer
    "dp_partition/capture/one.py": "from dp_partition.capture import two\n",  # a circle
    "dp_partition/capture/two.py": "def late():\n    from dp_partition.capture import one\n",
    "tp_ddp_bridge/_torch_compat.py": "import shard_reshard\n",  # not declared
    "shard_reshard/_torch_compat.py": "import shard_spec._torch_compat\n",  # private
}
BROKEN = {
    "shard-spec: imports go down its layers",
    "shard-spec: no circles of siblings",  # the import upwards closes one
    "tp-styles: imports go down its layers",
    "dp-partition: no circles of siblings",
    "tp-ddp-bridge: imports only what it declares",
    "shard-spec: only it imports its private modules",
}


def test_each_contract_is_broken_by_what_it_is_for(tmp_path: Path) -> None:
    for package in repo.packages().values():
        shutil.copytree(package.path / "src" / package.module, tmp_path / package.module)
    for file, code in PLANTED.items():
        with open(tmp_path / file, "a") as source:
            source.write(f"\n{code}")
    config = tmp_path / "pyproject.toml"
    config.write_text(layers.configuration())
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache", "--config", str(config)]
    lint = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    outcomes = {name: state for name, _, state in (line.rpartition(" ") for line in lint.stdout.splitlines())}
    assert {name for name, state in outcomes.items() if state == "BROKEN"} == BROKEN, lint.stdout + lint.stderr
    assert sum(state == "KEPT" for state in outcomes.values()) >= 4 * len(repo.packages()) - len(BROKEN) - 1
