"""What XLA's own products take: by the cycles that the TPU compiler estimates, ahead of time.

A product with its collective is compared with the two apart, and the product is then XLA's. It does
not attain the peak rate: the compiler's estimates are mostly 2 to 24% above it. They are kept
in `xla_products.json`; `python -m benchmarks fused --learn_products` asks for them anew.
"""

import functools
import itertools
import json
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from benchmarks import compiled, results
from benchmarks.steps import schedule
from pallas_collectives.topology import chips

PATH = Path(__file__).parent / "xla_products.json"
# For each chip a topology, as its pods are set up: both cores of v4 are one device.
_TOPOLOGIES: dict[str, tuple[str, dict[str, str]]] = {
    "v4": ("v4:2x2x1", {"chip_config_name": "megacore"}),
    "v5e": ("v5e:2x2", {}),
    "v5p": ("v5p:2x2x1", {}),
    "v6e": ("v6e:2x2", {}),
    "7x": ("tpu7x:2x2x1", {}),
}
Product = tuple[str, int, int, int]  # chip; rows, K, N of bfloat16


def seconds(product: Product) -> float | None:
    """What one takes on a device; None if the compiler has not been asked."""
    chip, *size = product
    cycles = _learned()["cycles"].get(chip, {}).get("x".join(map(str, size)))
    return None if cycles is None else cycles / chips.BY_NAME[chip].clock


def learn(products: Iterable[Product]) -> None:
    """Asks for products, and writes what is new beside what is known.

    Of another compiler's nothing is kept: what that was asked, this one is asked, too.
    """
    version, asked = metadata.version("libtpu"), set(products)
    found = _learned()["cycles"]
    if _learned()["libtpu"] != version:
        known = ((chip, size.split("x")) for chip, sizes in found.items() for size in sizes)
        asked |= {(chip, int(rows), int(depth), int(n)) for chip, (rows, depth, n) in known}
        found = {}
    for row in compiled.elsewhere("benchmarks.xla_products", sorted(asked)):
        found.setdefault(row["chip"], {})[row["size"]] = row["cycles"]
    text = json.dumps({"libtpu": version, "cycles": found}, indent=1, sort_keys=True)
    results.write(str(PATH), lambda file: file.write(text + "\n"))
    _learned.cache_clear()


@functools.cache
def _learned() -> dict[str, Any]:
    nothing = {"libtpu": "", "cycles": {}}
    return dict(json.loads(PATH.read_text(encoding="utf-8"))) if PATH.exists() else nothing


def _row(chip: str, *size: int) -> dict[str, Any]:
    return {"chip": chip, "size": "x".join(map(str, size)), "cycles": _cycles(chip, *size)}


def _cycles(chip: str, rows: int, depth: int, columns: int) -> int:
    sharding = jax.sharding.SingleDeviceSharding(_device(chip))
    operands = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)
        for shape in ((rows, depth), (depth, columns))
    ]
    program = jax.jit(jnp.matmul).lower(*operands).compile()
    return schedule.cycles_of(schedule.events(program.as_text() or ""))


@functools.cache
def _device(chip: str) -> jax.Device:
    name, options = _TOPOLOGIES[chip]
    found = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    device: jax.Device = found.devices[0]
    assert device.num_cores == chips.BY_NAME[chip].cores
    return device


if __name__ == "__main__":
    compiled.answer(functools.partial(itertools.starmap, _row))
