"""`explain`: which algorithm a call would get, and why."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_collectives import chips, hierarchy, places, tuning
from pallas_collectives.backends import algorithms, canonical, pallas_reductions
from pallas_collectives.chips import Chip
from pallas_collectives.errors import CollectiveError, DtypeError, SliceError, UnboundAxisError
from pallas_collectives.kernels.physical import Torus
from pallas_collectives.kernels.topology import Group

# The canonical collective that serves each of lax's.
CANONICAL = {
    "all_gather": "all_gather",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
    "pbroadcast": "all_reduce",
    "pmax": "all_reduce",
    "pmean": "all_reduce",
    "pmin": "all_reduce",
    "ppermute": "ppermute",
    "pshuffle": "ppermute",
    "psum": "all_reduce",
    "psum_scatter": "reduce_scatter",
    "pswapaxes": "all_to_all",
    "ragged_all_to_all": "ragged_all_to_all",
    "reduce_scatter": "reduce_scatter",
}
# In place of an algorithm: where lax serves, and where there is nothing to send.
LAX, NOTHING = "lax's own", "nothing"
_TILE_BYTES = 4096  # of hardware, whatever the dtype: no block is cut finer
# Whose operands are n blocks; others' are one.
_OF_BLOCKS = ("reduce_scatter", "all_to_all", "ragged_all_to_all")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An algorithm that could serve.

    Attributes:
      algorithm: its name.
      us: predicted microseconds; None where there is no prediction.
      latency_us: of these, what remains for the smallest operands.
      source: whose prediction it is, "modelled ..." or "measured ..."; or why there is none.
    """

    algorithm: str
    us: float | None
    latency_us: float | None
    source: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a collective would be served by, and why; printable.

    Attributes:
      op: the collective, as asked for.
      nbytes: bytes of one device's operand.
      devices: devices in the group.
      chip: the TPU generation.
      torus: how the group lies on the links: "ring", "line", or on several axes "4x4 torus",
        "2x4 grid" where none closes to a ring, "8x16 cylinder" where some do.
      algorithm: the one that is chosen; "lax's own" where lax serves, "nothing" where nothing is
        sent, "" across slices.
      why: in a sentence.
      candidates: all algorithms, the fastest first.
      inside: across slices, what serves inside each of them.
    """

    op: str
    nbytes: int
    devices: int
    chip: str
    torus: str
    algorithm: str
    why: str
    candidates: tuple[Candidate, ...]
    inside: tuple["Explanation", ...] = ()

    def __str__(self) -> str:
        on = f"a {self.torus} of {self.devices} x {self.chip}"
        lines = [f"{self.op} of {self.nbytes} bytes a device on {on}: {self.algorithm or 'steps'}"]
        lines.append(f"  {self.why}")
        if self.candidates:
            lines.append(f"  {'algorithm':<22}{'us':>9}{'latency':>9}   source")
        for c in self.candidates:
            us, latency = ("-" if t is None else f"{t:.1f}" for t in (c.us, c.latency_us))
            lines.append(f"  {c.algorithm:<22}{us:>9}{latency:>9}   {c.source}")
        for step in self.inside:
            lines += [f"  {line}" for line in str(step).splitlines()]
        return "\n".join(lines)


def explain(
    op: str,
    nbytes: int | None = None,
    *,
    shape: tuple[int, ...] | None = None,
    dtype: Any = jnp.float32,
    mesh: Any = None,
    axis_name: Any = None,
    devices: int | None = None,
    chip: str | None = None,
    torus: str | None = None,
) -> Explanation:
    """Which algorithm a collective would get with `algorithm="auto"`, and why.

    Nothing is run or compiled. Times are the tables' (see `tuning`), and say whether they are
    modelled or measured.

    Args:
      op: the collective, by lax's name or this library's: "psum", "all_gather", ...
      nbytes: bytes of one device's operand, what is given to the function; or
      shape, dtype: of that operand. Of a dtype that no kernel adds, lax's own serves.
      mesh: the mesh, with its devices or abstract, and
      axis_name: the axis of it, or tuple of axes; or
      devices, chip: how many devices, of what TPU generation ("v5e"); simulated ones by default.
      torus: "ring" or "line", where devices are given by number; by default what an axis of so
        many devices is on that chip.

    Raises:
      CollectiveError: a collective, chip or torus that is not known, or too little to go on.
      TableError: a table that cannot be read.

    Example:
      print(explain("psum", 32 << 10, devices=8, chip="v5p"))
    """
    _check(op, nbytes, shape, mesh, axis_name, devices, chip, torus)
    size = nbytes if nbytes is not None else math.prod(shape or ()) * jnp.dtype(dtype).itemsize
    if mesh is None:
        known = chips.SIMULATED if chip is None else chips.BY_NAME[chip]
        group = Group(("x",), (devices or 0,))
        lies = torus or tuning.torus_of(group.size, known)
        there = Torus((group.size,), (lies == "ring",))
        row = [there.place(number) for number in range(group.size)]
        instead = _instead(op, size, group, dtype)
        return _explained(op, size, group, known, lies, instead, (there, [row]))
    abstract = getattr(mesh, "abstract_mesh", mesh)
    with jax.sharding.use_abstract_mesh(abstract), places.scope(places.of_mesh(mesh)):
        group, known = canonical.group_of(axis_name), chips.current()
        instead, parts = _instead(op, size, group, dtype), None
        with hierarchy.scope(mesh):
            try:
                if not instead:
                    parts = hierarchy.split(group, hierarchy.slices(group, hierarchy.marked()))
            except SliceError as error:
                return Explanation(op, size, group.size, known.name, "", LAX, str(error), ())
        if parts is not None:
            return _across(op, size, group, parts, known)
        group = places.arranged(group)
        return _explained(op, size, group, known, algorithms.torus_of(group, known), instead)


def _check(
    op: str,
    nbytes: int | None,
    shape: Any,
    mesh: Any,
    axis_name: Any,
    devices: int | None,
    chip: str | None,
    torus: str | None,
) -> None:
    if op not in CANONICAL:
        rule = f"it is one of {', '.join(CANONICAL)}"
        raise CollectiveError(f"op={op!r}", rule, "name a collective")
    if (nbytes is None) == (shape is None):
        rule = "the operand's size is given either as nbytes or as shape and dtype"
        raise CollectiveError(f"nbytes={nbytes}, shape={shape}", rule, "give one of them")
    if (mesh is None) == (devices is None) or (mesh is None) != (axis_name is None):
        raise CollectiveError(
            f"mesh={mesh}, axis_name={axis_name!r}, devices={devices}",
            "the group is given either by mesh and axis_name or by a number of devices",
            "give one of them",
        )
    for name, number, least in (("devices", devices, 2), ("nbytes", nbytes, 0)):
        if number is not None and (not isinstance(number, int | np.integer) or number < least):
            rule = f"it is a whole number, {least} or more"
            raise CollectiveError(f"{name}={number!r}", rule, "give another")
    if shape is not None and not isinstance(shape, list | tuple):
        raise CollectiveError(
            f"shape={shape!r}", "it is a tuple of sizes", "write it like (8, 128)"
        )
    if mesh is not None:
        names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
        if len(set(names)) < len(names) or not set(names) <= set(mesh.axis_names):
            rule = f"it is one axis of the mesh, or a tuple of different ones: {mesh.axis_names}"
            raise UnboundAxisError(f"axis_name={axis_name!r}", rule, "name those")
    if chip is not None and (chip not in chips.BY_NAME or mesh is not None):
        rule = f"it is one of {', '.join(chips.BY_NAME)}, and goes with a number of devices"
        raise CollectiveError(f"chip={chip!r}", rule, "name one")
    if torus not in (None, "ring", "line") or (torus is not None and mesh is not None):
        rule = "it is 'ring' or 'line', and goes with a number of devices"
        raise CollectiveError(f"torus={torus!r}", rule, "name one, or leave it out")


def _instead(op: str, nbytes: int, group: Group, dtype: Any) -> tuple[str, str] | None:
    """What takes an algorithm's place, and why; None where a kernel serves (see `canonical`)."""
    if nbytes == 0:
        return NOTHING, "the operand is empty"
    if group.size == 1 and CANONICAL[op] not in ("ppermute", "ragged_all_to_all"):
        return NOTHING, "the group is one device"
    if CANONICAL[op] not in ("all_reduce", "reduce_scatter") or op == "pbroadcast":
        return None
    dtype = jnp.dtype(dtype)
    part = jnp.finfo(dtype).dtype if jnp.issubdtype(dtype, jnp.complexfloating) else dtype
    try:
        pallas_reductions.wire_dtype(part, op[1:] if op in ("pmax", "pmin") else "sum", False)
    except DtypeError as error:
        return LAX, str(error)
    return None


def _explained(
    op: str,
    nbytes: int,
    group: Group,
    chip: Chip,
    torus: str,
    instead: tuple[str, str] | None = None,
    lying: algorithms.Lying | None = None,
) -> Explanation:
    found: list[Candidate] = []
    if instead:
        algorithm, why = instead
    else:
        algorithm, why, found = _chosen(CANONICAL[op], nbytes, group, chip, torus, lying)
    return Explanation(op, nbytes, group.size, chip.name, torus, algorithm, why, tuple(found))


def _chosen(
    op: str,
    nbytes: int,
    group: Group,
    chip: Chip,
    torus: str,
    lying: algorithms.Lying | None,
) -> tuple[str, str, list[Candidate]]:
    """The algorithm of a canonical collective, why, and all that could serve."""
    n = group.size
    block = nbytes // n if op in _OF_BLOCKS else nbytes
    shard = block // n if op == "all_reduce" else block
    reached = algorithms.reachable(op, group, chip, shard // _TILE_BYTES, lying)
    predicted = tuning.predict(op, block, n, chip, reached, torus)
    found = [
        Candidate(name, p.us, p.latency_us, _source(p))
        for name in tuning.fastest_first(predicted)
        for p in [predicted[name]]
    ]
    found += [
        Candidate(name, None, None, _no_time(op, name, name in reached, group, chip, lying))
        for name in algorithms.ALGORITHMS[op]
        if name not in predicted
    ]
    if not reached:
        return LAX, f"{chip.name} cannot write between these devices", found
    chosen = tuning.choose(op, block, n, chip, reached, torus)
    return chosen, _why(chosen, found), found


def _no_time(
    op: str,
    name: str,
    reached: bool,
    group: Group,
    chip: Chip,
    lying: algorithms.Lying | None,
) -> str:
    """Why there is no prediction for an algorithm."""
    if reached:
        return "no table has it"
    if not algorithms.serves(op, name, group, chip, lying):
        return f"{chip.name} cannot write to all the devices that it would have to"
    if name == "torus":
        too_small = "a block has too few tiles to be cut for all axes"
        return too_small if group.torus else "for groups over several axes of a torus"
    return "the devices have no ring of single links"


def _source(prediction: tuning.Prediction) -> str:
    of = " and ".join(map(str, prediction.devices))
    table = prediction.table
    if table.measured:
        return f"measured with JAX {table.jax} on {of} devices ({table.path})"
    return f"modelled by replay, for {of} devices"


def _why(chosen: str, found: list[Candidate]) -> str:
    timed = [c for c in found if c.us is not None and c.latency_us is not None]
    if not timed or chosen != timed[0].algorithm:
        return "it is the only one that can serve, or the only one known of"
    best, us, latency = timed[0], timed[0].us or 0.0, timed[0].latency_us or 0.0
    share = 100 * min(1.0, latency / us)
    rules = (
        f"latency, so hops, is {share:.0f}% of it"
        if share > 50
        else f"bytes on the busiest link are {100 - share:.0f}% of it"
    )
    kind = best.source.split()[0]
    if len(timed) == 1:
        return f"{kind} {us:.1f} us, {rules}; no other has a time"
    return f"{kind} {us:.1f} us against {timed[1].us:.1f} of {timed[1].algorithm}; {rules}"


def _across(op: str, nbytes: int, group: Group, parts: hierarchy.Split, chip: Chip) -> Explanation:
    """The steps of a collective over several slices."""
    within = CANONICAL[op]
    inside = {
        "all_gather": (("all_gather", nbytes * parts.slices),),
        "reduce_scatter": (("reduce_scatter", nbytes),),
        "all_reduce": (
            ("reduce_scatter" if op not in ("pmax", "pmin") else "all_reduce", nbytes),
            ("all_gather", -(-nbytes // parts.inside.size)),
        ),
    }.get(within)
    inner = places.arranged(parts.inside)
    torus = algorithms.torus_of(inner, chip)
    if inside is None:
        why = "it spans slices, whose network is XLA's"
        return Explanation(op, nbytes, group.size, chip.name, torus, LAX, why, ())
    steps = tuple(_explained(step, size, inner, chip, torus) for step, size in inside)
    why = f"kernels inside each of {parts.slices} slices, lax between them"
    return Explanation(op, nbytes, group.size, chip.name, torus, "", why, (), steps)
