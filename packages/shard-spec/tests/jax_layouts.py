"""Layouts against JAX's ``NamedSharding``: which rows lie on which device. Run by ``nox -s "hosts(jax)"``.

JAX takes only shapes that each dim's axes divide, so every case here does; uneven ones are compared with DTensor.
"""

import importlib
import random
from typing import Any

from shard_spec import Box, Layout, MeshSpec, Shard

jax: Any = importlib.import_module("jax")
NUM_CASES = 10_000
NUM_DEVICES = 64


def random_case(rng: random.Random) -> tuple[tuple[int, ...], MeshSpec, list[list[str]]]:
    """Return a shape, a mesh of 2 to 4 axes, and for each dim the axes that shard it, outermost first."""
    sizes: list[int] = []
    while len(sizes) < rng.randint(2, 4):
        size = rng.choice((1, 2, 2, 3, 4, 5))
        if size * MeshSpec({f"a{at}": each for at, each in enumerate(sizes)} or {"a": 1}).world_size <= NUM_DEVICES:
            sizes.append(size)
    mesh = MeshSpec({f"a{at}": size for at, size in enumerate(sizes)})
    dims: list[list[str]] = [[] for _ in range(rng.randint(1, 4))]
    for axis in rng.sample(mesh.axis_names, mesh.ndim):
        if rng.random() < 0.75:
            rng.choice(dims).append(axis)
    shape = []
    for axes in dims:
        length = rng.choice((1, 2, 3, 5))
        for axis in axes:
            length *= mesh.axis_size(axis)
        shape.append(length)
    return tuple(shape), mesh, dims


def test_every_rank_holds_the_rows_that_jax_gives_its_device() -> None:
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    devices = jax.devices("cpu")
    rng, compared, several = random.Random(0), 0, 0
    for _ in range(NUM_CASES):
        shape, mesh, dims = random_case(rng)
        used = [devices[rank] for rank in range(mesh.world_size)]
        order = [axis for axes in dims for axis in axes]
        by_axis = {axis: Shard(dim) for dim, axes in enumerate(dims) for axis in axes}
        layout = Layout(mesh, by_axis, order)
        grid = importlib.import_module("numpy").array(used, dtype=object).reshape(mesh.shape)
        names = [tuple(axes) or None for axes in dims]
        sharding = jax.sharding.NamedSharding(
            jax.sharding.Mesh(grid, mesh.axis_names), jax.sharding.PartitionSpec(*names)
        )
        for device, index in sharding.devices_indices_map(shape).items():
            bounds = [each.indices(length)[:2] for each, length in zip(index, shape, strict=True)]
            expected = Box(tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds))
            assert layout.boxes(device.id, shape) == (expected,), (layout, shape, device.id)
            compared += 1
        several += any(len(axes) > 1 for axes in dims)
    assert compared > 2 * NUM_CASES
    assert several > NUM_CASES // 4
