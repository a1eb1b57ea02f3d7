import pytest
from random_whole import attack
from ranktest import Ranks


@pytest.mark.ranks(2, 3, 4, timeout=300)
@pytest.mark.parametrize("first", [1000, 2000, 3000])
def test_attack(ranks: Ranks, first: int) -> None:
    counts = attack(ranks, 40, first=first + 100 * ranks.world_size)
    if ranks.rank == 0:
        open(f"/tmp/att/{first}-{ranks.world_size}", "w").write(str(dict(counts)))
