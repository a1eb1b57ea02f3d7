"""Laws of the index arithmetic."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator

import pytest
import torch
from tp_styles.values import Section, Split


def random_splits(count: int) -> Iterator[tuple[Split, int]]:
    rng = random.Random(11)
    for _ in range(count):
        tp_size = rng.choice([1, 2, 3, 4, 6, 8])
        sections = []
        for _ in range(rng.randint(1, 3)):
            unit = rng.randint(1, 3)
            copies = rng.choice([copies for copies in (1, 2, 4) if tp_size % copies == 0])
            sections.append(Section(unit * rng.randint(0, 9), unit, copies))
        yield Split(rng.randint(0, 1), tuple(sections)), tp_size


def test_join_undoes_take() -> None:
    for split, tp_size in random_splits(300):
        shape = [3, 3]
        assert split.dim is not None
        shape[split.dim] = split.global_size
        full = torch.arange(split.global_size * 3).view(shape)
        parts = [split.take(full, rank, tp_size) for rank in range(tp_size)]
        assert torch.equal(split.join(parts), full)
        assert split.sizes(tp_size) == tuple(part.shape[split.dim] for part in parts)
        assert all(part.shape == split.local_shape(shape, r, tp_size) for r, part in enumerate(parts))
        assert all(not part.numel() or part.data_ptr() != full.data_ptr() for part in parts)


def test_every_row_on_as_many_ranks_as_copies_say() -> None:
    for split, tp_size in random_splits(300):
        offset = 0
        for index, section in enumerate(split.sections):
            owners = [0] * section.size
            for rank in range(tp_size):
                start, stop = split.ranges(rank, tp_size)[index]
                assert (start - offset) % section.unit == (stop - offset) % section.unit == 0
                for row in range(start, stop):
                    owners[row - offset] += 1
            assert set(owners) <= {section.copies}
            offset += section.size


def test_a_plain_split_is_torch_chunk() -> None:
    for size in range(20):
        for tp_size in (1, 2, 3, 4, 8):
            split = Split.along(0, size)
            chunks = [list(chunk) for chunk in torch.arange(size).chunk(tp_size)] if size else []
            chunks += [[]] * (tp_size - len(chunks))
            assert [list(range(*split.ranges(rank, tp_size)[0])) for rank in range(tp_size)] == chunks
            assert split.is_plain(tp_size)


def test_values() -> None:
    fused = Split(0, (Section(4, 2), Section(8, 2)))
    assert pickle.loads(pickle.dumps(fused)) == fused == eval(repr(fused))
    assert hash(fused) == hash(Split(0, (Section(4, 2), Section(8, 2))))
    assert not fused.is_plain(2)
    assert not Split.along(0, 8, copies=2).is_plain(4)
    assert Split.along(0, 8, unit=2).is_plain(4)
    assert not Split.along(0, 6, unit=2).is_plain(2)  # 4 rows and 2, where Shard has 3 and 3
    assert Split.replicated().is_plain(4)
    for dim, sections in ((0, (Section(5, 2),)), (0, (Section(-1),)), (0, ()), (-1, (Section(1),))):
        with pytest.raises(ValueError, match=r"must|has a dim"):
            Split(dim, sections)
