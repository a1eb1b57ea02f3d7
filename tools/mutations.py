"""Runner of the mutation tools: try each mutation, print what became of it, write a page, exit 1 if one survived."""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Outcome:
    """What became of one mutation.

    Attributes:
        mutation: Its name.
        result: ``killed``, ``survived``, or what is wrong with the mutation.
        how: What found it, in one line.
        seconds: How long it took.
    """

    mutation: str
    result: str
    how: str = ""
    seconds: float = 0.0


def main(
    usage: str | None,
    names: Iterable[str],
    attempt: Callable[[str], list[Outcome]],
    page: Callable[[dict[str, list[Outcome]]], list[str]],
    prepare: Callable[[list[str]], str] = lambda chosen: "",
) -> int:
    """Run a mutation tool.

    Args:
        usage: The tool's docstring.
        names: Everything that can be mutated.
        attempt: Tries the mutations of one name.
        page: Lines of the Markdown page, without the line of versions.
        prepare: Shows that all is right without mutations; returns what is wrong.

    Returns:
        0: every mutation was killed. 1: one survived, or does not fit the sources any more.
    """
    parser = argparse.ArgumentParser(description=usage, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the outcomes as a page")
    arguments = parser.parse_args()
    known = list(names)
    unknown = sorted(set(arguments.names) - set(known))
    if unknown:
        parser.error(f"nothing named {', '.join(unknown)}; there are: {'; '.join(known)}")
    chosen = [name for name in known if not arguments.names or name in arguments.names]
    wrong = prepare(chosen)
    if wrong:
        print(f"wrong without any mutation:\n{wrong}")
        return 1
    outcomes: dict[str, list[Outcome]] = {}
    for name in chosen:
        begin = time.monotonic()
        outcomes[name] = attempt(name)
        alive = [f"{each.mutation} {each.result}" for each in outcomes[name] if each.result != "killed"]
        count = f"{len(outcomes[name]) - len(alive)}/{len(outcomes[name])}"
        print(f"{count:>6} {time.monotonic() - begin:6.1f} s  {name}  {', '.join(alive)}", flush=True)
    every = [each for tried in outcomes.values() for each in tried]
    killed = sum(each.result == "killed" for each in every)
    print(f"{len(every)} mutations, {killed} killed")
    if arguments.page:
        import torch

        versions = f"Python {platform.python_version()}, torch {torch.__version__}."
        arguments.page.write_text("\n".join([*page(outcomes), "", versions, ""]))
    return 0 if killed == len(every) else 1
