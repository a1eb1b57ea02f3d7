"""Column-wise layers with several sections in one weight."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import Placement

from tp_styles.problems import Problem, StyleTypeError
from tp_styles.styles.colwise import ColwiseParallel
from tp_styles.values.spec import ModuleInfo
from tp_styles.values.split import Section, Split


class FusedColwiseParallel(ColwiseParallel):
    """`ColwiseParallel` for a weight of several consecutive sections: q, k, v or gate, up.

    Each section is sharded on its own: `chunk` or `split` of the local output gives this rank's shard of each.
    The weight is no plain shard and is never labelled as one: it is a local parameter with `_sharding_info`.

    Args:
        sections: Sizes of the sections in rows, or how many equal ones there are.
        unit: Indivisible rows (the size of a head); one number, or one for each section.
        copies: How many neighbouring ranks hold each shard (few key-value heads over many ranks); one number, or one
            for each section. Their gradients are summed.
        input_layouts: As `ColwiseParallel`.
        output_layouts: `Shard(-1)`, or `Replicate()` for the full output in its usual order.
        use_local_output: Must stay True for a sharded output: a DTensor cannot express sections.

    Raises:
        StyleTypeError: Sections, units or copies are not positive numbers.
    """

    def __init__(
        self,
        sections: int | Sequence[int] = 2,
        *,
        unit: int | Sequence[int] = 1,
        copies: int | Sequence[int] = 1,
        input_layouts: Placement | tuple[Placement, ...] | None = None,
        output_layouts: Placement | tuple[Placement, ...] | None = None,
        use_local_output: bool | None = None,
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        self.sections = sections if isinstance(sections, int) else tuple(sections)  # as given, for the repr
        self.unit = unit if isinstance(unit, int) else tuple(unit)
        numbers = [self.sections] if isinstance(self.sections, int) else [*self.sections]
        self.copies = copies if isinstance(copies, int) else tuple(copies)
        numbers += [self.unit] if isinstance(self.unit, int) else [*self.unit]
        numbers += [self.copies] if isinstance(self.copies, int) else [*self.copies]
        if not numbers or min(numbers) < 1:
            raise StyleTypeError(
                Problem(
                    "invalid-sections",
                    type(self).__name__,
                    found=f"{sections!r}, unit={unit!r}, copies={copies!r}",
                    hint="positive numbers",
                )
            )

    def features_split(self, info: ModuleInfo, features: int, tp_size: int) -> tuple[Split, list[Problem]]:
        """Split each section separately; return reasons against it too."""
        sizes = (features // n,) * n if isinstance(n := self.sections, int) else n
        units = (self.unit,) * len(sizes) if isinstance(self.unit, int) else self.unit
        copies = (self.copies,) * len(sizes) if isinstance(self.copies, int) else self.copies
        where = ""
        if sum(sizes) != features or len(units) != len(sizes) or len(copies) != len(sizes):
            where, found = "sections", f"{self.sections} (units {self.unit}) for {features} output features"
            hint = "sections add up to the output features, and there is one unit, or one for each"
        elif bad := [pair for pair in zip(sizes, units, strict=True) if pair[0] % pair[1]]:
            where, found = "unit", ", ".join(f"{size} rows by {unit}" for size, unit in bad)
            hint = "a section must hold full units"
        elif unfit := [count for count in copies if tp_size % count]:
            where, found = "copies", f"{unfit} copies over {tp_size} ranks"
            hint = "the number of copies divides the tp size"
        if where:
            return Split.along(0, features), [Problem("invalid-sections", info.where(where), found=found, hint=hint)]
        problems = []
        if not self.use_local_output and (len(sizes) > 1 or max(copies) > 1):
            hint = "a DTensor cannot express sections of its last dim; leave it True"
            problems.append(Problem("invalid-argument", info.where("use_local_output"), found="False", hint=hint))
        sections = tuple(Section(*each) for each in zip(sizes, units, copies, strict=True))
        return Split(0, sections), problems
