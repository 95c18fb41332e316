"""What the flags ask for, checked before anything runs."""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.cases import CASES, Case
from pallas_collectives import wires
from pallas_collectives.annotations import DType
from pallas_collectives.backends.plans import NAMES
from pallas_collectives.catalogue import ALGORITHMS
from pallas_collectives.errors import CollectiveError
from pallas_collectives.topology import chips

AXES = ("x", "y", "z")
# Devices that the interpreter runs within minutes, and runs that are no mistake.
MOST_SIMULATED, MOST_RUNS = 64, 1_000_000
_LARGEST, _MOST_SIZES = 1 << 40, 256
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class FlagError(CollectiveError):
    """A flag whose value makes no sense."""

    def __init__(self, value: str, rule: str, remedy: str) -> None:
        super().__init__(value, rule, remedy)
        self.said = (value, rule, remedy)  # for another process to raise it again


def check_no_arguments(argv: Sequence[str]) -> None:
    """Refuses what is no flag, behind the name of a command that takes flags only."""
    if argv[1:]:
        raise FlagError(f"argument {argv[1]!r}", "this command takes flags only", "see --help")


def parse_steps(first: str, last: str, factor: str) -> tuple[int, ...]:
    """The sizes of nccl-tests' -b, -e and -f; a last size or a factor left out is as there."""
    for size, flag in ((first, "-b"), (last or first, "-e")):
        parse_bytes(size, flag)
    try:
        return parse_sizes(f"{first}:{last or first}:{factor or 2}x")
    except FlagError as error:
        rule = "-b is at most -e, and -f a factor above 1 that makes at most 256 sizes"
        given = f"-b {first} -e {last or first} -f {factor or 2}"
        raise FlagError(given, rule, "write it like -b 8K -e 256M -f 2") from error


def parse_count(text: str, flag: str, most: int = 1 << 20) -> int:
    """A whole number from 1 to `most`."""
    if not re.fullmatch(r"[1-9]\d{0,18}", text) or int(text) > most:
        rule = f"it must be a whole number from 1 to {most}"
        raise FlagError(f"{flag}={text[:40]}", rule, f"write {flag}=1, for example")
    return int(text)


def parse_bytes(text: str, flag: str = "--sizes") -> int:
    """A number of bytes: "8192", "8K", "256M", "1G" (powers of 1024, as nccl-tests has them)."""
    match = re.fullmatch(r"0*([1-9]\d{0,12})([KMG]?)B?", text.strip().upper())
    size = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < size <= _LARGEST:
        rule = (
            "it must be a whole number of bytes from 1 to 1024G, with K, M or G (powers of 1024) "
            "behind it"
        )
        joined = "=" if flag.startswith("--") else " "
        raise FlagError(f"{flag}{joined}{text[:40]!r}", rule, "write it like 8192, 8K or 256M")
    return size


def parse_sizes(text: str) -> tuple[int, ...]:
    """The sizes in bytes of a sweep: "8K", "8K:256M:2x" (times 2) or "8K:64K:8K" (plus 8 KiB).

    Raises:
      FlagError: not of this form, or no size in it.
    """
    first, *rest = text.split(":")
    if len(rest) not in (0, 2):
        rule = "it must be SIZE or FIRST:LAST:STEP"
        raise FlagError(f"--sizes={text}", rule, "write it like 8K or 8K:256M:2x")
    size = parse_bytes(first)
    if not rest:
        return (size,)
    last, step = parse_bytes(rest[0]), rest[1].strip().lower()
    factor, plus = (step[:-1], 0) if step.endswith("x") else ("1", parse_bytes(step))
    if last < size or not re.fullmatch(r"\d{1,9}", factor) or not (plus or int(factor) > 1):
        rule = "FIRST is at most LAST, and STEP is a factor like 2x, above 1x, or a size to add"
        raise FlagError(f"--sizes={text}", rule, "write it like 8K:256M:2x or 8K:64K:8K")
    sizes: list[int] = []
    while size <= last and len(sizes) <= _MOST_SIZES:
        sizes.append(size)
        size = size * int(factor) + plus
    if len(sizes) > _MOST_SIZES:
        rule = f"these are more than {_MOST_SIZES} sizes"
        raise FlagError(f"--sizes={text}", rule, "take a larger step")
    return tuple(sizes)


def parse_mesh(text: str) -> tuple[int, ...]:
    """The sizes of a mesh's axes: "8" or "4x2"."""
    if not re.fullmatch(r"[1-9]\d{0,4}(x[1-9]\d{0,4}){0,2}", text):
        rule = "a mesh must be one to three axis sizes, each below 100000, with x between them"
        raise FlagError(f"--mesh={text}", rule, "write it like 8, 4x2 or 4x4x4")
    return tuple(map(int, text.split("x")))


def parse_axis(text: str, mesh: Sequence[Any], flag: str = "--axis") -> tuple[str, ...]:
    """The mesh axes to communicate over: "x", or "x,y" for both together."""
    axes, names = tuple(text.split(",")), AXES[: len(mesh)]
    if not set(axes) <= set(names) or len(set(axes)) < len(axes):
        rule = f"a mesh of {len(mesh)} dimensions has the axes {', '.join(names)}"
        raise FlagError(f"{flag}={text}", rule, "name one, or several with commas, each once")
    return axes


def parse_topology(text: str, flag: str) -> str:
    """The name of a TPU topology, as "v5e:2x4"."""
    if not re.fullmatch(r"[a-z0-9]+:\d+(x\d+){1,2}", text):
        rule = "a topology must be a TPU generation and the chips along each dimension"
        raise FlagError(f"{flag}={text}", rule, "write it like v5e:2x4 or v5p:2x2x2")
    return text


def parse_slice(text: str, flag: str) -> str:
    """A TPU topology of a size that pods have, by the compiler's name."""
    if chips.slice_of(parse_topology(text, flag)) is None:
        rule = f"it must be a slice of a pod of {', '.join(chips.BY_NAME)}"
        raise FlagError(f"{flag}={text}", rule, "write it like v5e:4x4")
    return chips.compilers_name(text)


def parse_dtype(text: str) -> str:
    """The name of a JAX dtype of whole bytes, such as arrays can have here."""
    remedy = "write it like float32, bfloat16 or int8"
    try:
        dtype = jnp.dtype(text)
        if dtype != jnp.bool_ and not jnp.issubdtype(dtype, jnp.number):
            raise TypeError(text)
    except TypeError:
        rule = "it must be the name of a JAX dtype"
        raise FlagError(f"--dtype={text}", rule, remedy) from None
    if _bits(dtype) < 8:
        rule = "its elements are smaller than a byte, and sizes here are in bytes"
        raise FlagError(f"--dtype={text}", rule, remedy)
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        rule = "JAX makes it narrower as long as 64-bit types are off"
        raise FlagError(f"--dtype={text}", rule, "set JAX_ENABLE_X64=1, or name another")
    return dtype.name


def _bits(dtype: DType) -> int:
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    return jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else dtype.itemsize * 8


def check_wires(names: Sequence[str], dtypes: Sequence[str]) -> tuple[str, ...]:
    """Dtypes of wires, each narrower than all element types."""
    for name in names:
        if name not in wires.DTYPES:
            rule = f"it must be one of {', '.join(wires.DTYPES)}"
            raise FlagError(f"--wire={name}", rule, "name one, or several with commas")
        for dtype in dtypes:
            if why := wires.obstacle(wires.Wire(name), dtype):
                raise FlagError(f"--wire={name} with --dtype={dtype}", why, "name another wire")
    return tuple(dict.fromkeys(names))


def choose_cases(names: Sequence[str]) -> tuple[Case, ...]:
    """The records of the collectives named; by default all that have kernels."""
    known = {case.name: case for case in CASES}
    _check_all(names, known, "--collective")
    return tuple(known[name] for name in names) or tuple(known.values())


def check_algorithms(names: Sequence[str], cases: Sequence[Case]) -> tuple[str, ...]:
    """Algorithm names, each offered by one of the cases, alone or with ":vmem" behind it."""
    known = sorted({name for case in cases for name in ALGORITHMS[case.op]})
    _check_all([name.partition(":")[0] for name in names], known, "--algorithm")
    return tuple(names)


def check_backends(names: Sequence[str]) -> tuple[str, ...]:
    """Backend names."""
    _check_all(names, NAMES, "--backend")
    return tuple(names)


def check_axes_of(axes: Sequence[str], there: Iterable[str], pod: str) -> None:
    """Refuses to communicate over axes that a pod does not have."""
    if missing := sorted(set(axes) - set(there)):
        rule = f"{pod} has the axes {', '.join(there) or 'of one device'}"
        raise FlagError(f"--axis={missing[0]}", rule, "name one of them, or a larger pod")


def _check_all(names: Sequence[str], known: Sequence[str] | dict[str, Case], flag: str) -> None:
    for name in names:
        if name not in known:
            remedy = "name one, several with commas, or leave the flag out for all"
            raise FlagError(f"{flag}={name}", f"it must be one of {', '.join(known)}", remedy)


@dataclasses.dataclass(frozen=True)
class Settings:
    """A run as asked for; empty tuples leave the choice to the platform.

    Attributes:
      cases: the collectives.
      algorithms: names, with ":vmem" behind them or not.
      backends: names.
      dtypes: names.
      sizes: sizes of the full array, in bytes.
      mesh: sizes of its axes.
      axes: names of the axes to communicate over.
      warmup: untimed runs before the timed ones.
      iters: collectives in one timed chain.
      seed: the seed of the random operands.
      check: whether results are verified.
      timed: whether real devices are timed.
      chain: whether device time is taken, and not dispatch with it.
      trace: folder for profiles of what is timed; "" for none.
      topologies: TPUs to compile for.
      pods: TPUs to replay on, instead of measuring and compiling.
      wires: dtypes of wires to compare with none, instead of all else.
    """

    cases: tuple[Case, ...]
    algorithms: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("float32",)
    sizes: tuple[int, ...] = ()
    mesh: tuple[int, ...] = ()
    axes: tuple[str, ...] = ("x",)
    warmup: int = 2
    iters: int = 20
    seed: int = 0
    check: bool = True
    timed: bool = True
    chain: bool = True
    trace: str = ""
    topologies: tuple[str, ...] = ()
    pods: tuple[str, ...] = ()
    wires: tuple[str, ...] = ()

    def named(self) -> dict[str, Any]:
        """The settings as JSON takes them: cases by their names."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**fields, "cases": [case.name for case in self.cases]}
