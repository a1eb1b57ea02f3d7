"""No package unpickles, evaluates or executes what it reads; the scan finds each of these where it is planted."""

from __future__ import annotations

import ast

import pytest
import structure

# torch.load with weights_only=True is safe; nothing here reads torch files at all, so it is named with the others.
LOADERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "torch", "numpy", "np"}
BUILTINS = {"eval", "exec", "__import__"}
SAFE: set[tuple[str, str]] = set()


def unsafe_calls(source: str, file: str = "planted.py") -> list[str]:
    """What a source does that could run code of a file."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            owner, _, last = name.rpartition(".")
            unsafe = (last in ("load", "loads", "Unpickler", "open") and owner.split(".")[0] in LOADERS) or (
                not owner and last in BUILTINS
            )
            unsafe |= name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load", "load", "loads", "Unpickler")
            unsafe |= last == "read_metadata" or any(
                k.arg in ("trust_remote_code", "allow_pickle")
                or (k.arg == "weights_only" and ast.unparse(k.value) != "True")
                for k in node.keywords
            )
            if unsafe and (file, name) not in SAFE:
                found.append(f"{file}:{node.lineno}: {name}")
    return found


def test_no_package_runs_what_it_reads() -> None:
    files = structure.sources()
    assert len(files) > 100
    assert [call for file in files for call in unsafe_calls(file.read_text(), file.name)] == []


@pytest.mark.parametrize(
    "planted",
    [
        "pickle.load(file)",
        "pickle.loads(data)",
        "pickle.Unpickler(file)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "anything(path, weights_only=False)",
        "numpy.load(path, allow_pickle=True)",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.unsafe_load(text)",
        "marshal.loads(data)",
        "shelve.open(path)",
        "joblib.load(path)",
        "eval(text)",
        "exec(text)",
        "FileSystemReader(path).read_metadata()",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_what_is_planted_is_found(planted: str) -> None:
    assert unsafe_calls(planted)


@pytest.mark.parametrize("fine", ["json.loads(text)", "re.compile(text)", "model.eval()", "yaml.safe_load(text)"])
def test_what_is_fine_is_not(fine: str) -> None:
    assert unsafe_calls(fine) == []
