"""Findings of a check: the verdict of one comparison, the lines of a report, and the problems of an error."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from tp_styles._shared.execution_check import Compared
from tp_styles.check.compare import Difference
from tp_styles.problems import Problem

ALIKE = "all of its input values are equal, which may hide a mistake; the next call with other values is checked"


class Stage(IntEnum):
    """Last completed step of a comparison."""

    NOTHING = 0
    SHARDED = 1
    OUTPUTS = 2
    SHARDED_BACKWARD = 3
    ALL = 4


@dataclass
class Verdict:
    """One comparison of both runs; the same on every rank.

    Attributes:
        stage: The last completed step.
        differences: Unequal values.
        is_closed: Outputs are full, so a region around this one may use them as the original's.
        failure: The error that ended it early.
        place: First module with another output.
        compared: Counts of compared values.
        blank: Names of values that are zero in both runs, or parameters without a gradient: nothing was compared.
        is_constant: Inputs of one value went into both runs, and may hide a mistake.
        local: Places of outputs that are shards in plain tensors, on their last dim.
    """

    stage: Stage = Stage.NOTHING
    differences: list[Difference] = field(default_factory=list)
    is_closed: bool = False
    failure: str = ""
    place: str = ""
    compared: Compared = field(default_factory=Compared)
    blank: list[str] = field(default_factory=list)
    is_constant: bool = False
    local: tuple[str, ...] = ()

    def failed(self, failure: str) -> Verdict:
        """Return the verdict, ended by an error."""
        step = ("the sharded run", "the original", "the sharded backward", "the original's backward")[self.stage]
        self.failure = f"{step} raised {failure}"
        return self

    @property
    def raises(self) -> bool:
        """True if only the sharded run raises, which other numbers or another type may mend."""
        return any(difference.kind == "raises" for difference in self.differences)

    @property
    def is_final(self) -> bool:
        """True if no run with other numbers, or in another type, is needed."""
        return self.stage == Stage.ALL or (bool(self.differences) and not self.raises)

    @property
    def reason(self) -> str:
        """The reason against a comparison; `""` if there was one."""
        if not self.failure and self.stage >= Stage.OUTPUTS and not self.compared:
            return "its forward returns and keeps no tensors that could be compared"
        return self.failure or (ALIKE if self.is_constant and self.stage >= Stage.OUTPUTS else "")

    def __str__(self) -> str:
        if self.reason:
            return f"unchecked: {self.reason}"
        more = f" and {len(self.blank) - 8} more" if len(self.blank) > 8 else ""
        zeros = f"; unchecked, zero or without a gradient in both runs: {', '.join(self.blank[:8])}{more}"
        return f"equal to the original ({self.compared}){zeros if self.blank else ''}"


HINTS = {
    "output": "FusedColwiseParallel where a weight has several sections (q, k, v; gate, up); local head counts"
    " (GQAParallel, or view(..., -1, head_size)) where heads are divided; ColwiseParallel(output_layouts=Replicate())"
    " for what needs all features",
    "gradient": "each rank has a partial sum of this gradient: NoParallel(sum_gradient=True) for its module (norms= of"
    " GQAParallel), or a style that shards it",
    "input-gradient": "the ranks' gradients of the input are not summed: a module takes a shard's part of it unstyled",
    "raises": "a layer after a column-wise one takes its shard: RowwiseParallel() for it, or"
    " ColwiseParallel(output_layouts=Replicate()) for the one before; RowwiseParallel(input_layouts=Replicate())"
    " for a full input; local sizes where code has numbers of its own; BlockParallel(shard={name: dim}) for a module's"
    " own parameter of each head or channel (sinks, scales of [heads, 1, 1])",
    "cache": "a filled key-value cache comes in with all heads (prefix tuning of peft makes one), where a rank's cache"
    " holds its own: PromptTuningConfig and LoRA are right",
    "buffer": "each rank updates it from its own shard",
    "attribute": "the forward leaves it behind, computed from one rank's shard: compute it from full outputs, or reduce"
    " it over the tensor-parallel ranks",
    "shard-leaves": "every rank would go on with its own features: output_layouts=Replicate() gives full outputs;"
    " output_layouts=Shard(-1) declares that shards are meant (vocab_parallel_cross_entropy takes them); attention"
    " weights are of this rank's heads: all of them come after undo()",
}


def problem(
    scope: str,
    difference: Difference,
    place: str,
    *,
    unstyled: frozenset[str],
    has_cache: bool,
    hints: dict[str, str] | None,
) -> Problem:
    """Return the problem of a difference in a scope, with its remedy."""
    name = (
        f"{scope} {difference.name}" if "output" in difference.name or "input" in difference.name else difference.name
    )
    code = {"shard-leaves": "shard-leaves", "raises": "check-raises"}.get(difference.kind, "check-mismatch")
    reason = f"{difference.kind} differs from the original module's by {difference.error:.2g} (run on full weights)"
    reason = f"{difference.kind}: {difference.detail}, run on full weights" if difference.detail else reason
    reason += f"; both part first at the output of {place}" if difference.kind == "output" and place else ""
    if difference.kind == "shard-leaves":
        reason = f"a shard leaves the model as a plain tensor: {difference.detail}"
    if difference.kind == "raises":
        name, reason = difference.name or name, f"{difference.detail}; the original, on full weights, runs"
    hint = (hints or HINTS)["cache" if difference.kind == "raises" and has_cache else difference.kind]
    if "mixed torch.Tensor and DTensor" in difference.detail:
        hint = (
            "one of both is a DTensor: PrepareModuleInput(use_local_output=True) for plain parameters; a style of"
            " your own that makes DTensors of parameters prepares the inputs too (distribute_module(input_fn=...))"
        )
    if difference.kind == "gradient" and difference.name not in unstyled and hints is None:
        hint = "the forward uses this parameter other than its style expects: as a bare weight, or on other inputs"
    return Problem(code, name, found=f"in region {scope!r}: {reason}", hint=hint + '; check="never" skips the check')
