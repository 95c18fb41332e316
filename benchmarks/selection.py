"""The flags that say what to run, shared by the commands that run collectives."""

import math

import jax
from absl import flags

from benchmarks import devices, settings, timing
from benchmarks.settings import FlagError, Settings

flags.adopt_module_key_flags(timing)

_COLLECTIVE = flags.DEFINE_list("collective", [], "Collectives, by lax's names; all by default.")
_ALGORITHM = flags.DEFINE_list("algorithm", [], "Algorithms of the kernels; all by default.")
_BACKEND = flags.DEFINE_list(
    "backend", [], "pallas, nccl, or xla for jax.lax itself; by default what the platform has."
)
_COMPARE = flags.DEFINE_enum(
    "compare", None, ["lax"], "Run lax's beside the others, and add a column that compares."
)
_DTYPE = flags.DEFINE_list("dtype", [], "Element types, by JAX's names; by default float32.")
_SIZES = flags.DEFINE_string(
    "sizes",
    None,
    "Bytes of the full array: SIZE, or FIRST:LAST:STEP with a STEP like 2x, or 8K to add. "
    "By default 8K:256M:2x; 8K:512K:64x on simulated devices; 64K:64M:32x in replays and certify.",
)
_BEGIN = flags.DEFINE_string("begin", "", "First size, as nccl-tests' -b.", short_name="b")
_END = flags.DEFINE_string("end", "", "Last size, as nccl-tests' -e.", short_name="e")
_FACTOR = flags.DEFINE_string("factor", "", "From size to size, as nccl-tests' -f.", short_name="f")
_MESH = flags.DEFINE_string("mesh", None, "Axis sizes, as 4x2; by default all devices on one.")
_AXIS = flags.DEFINE_string("axis", "x", "Mesh axes to communicate over, of x, y and z, as x,y.")
_DEVICES = flags.DEFINE_integer(
    "devices",
    8,
    "TPU devices to simulate where there are no real ones.",
    lower_bound=2,
    upper_bound=settings.MOST_SIMULATED,
)
_WARMUP = flags.DEFINE_integer(
    "warmup", 2, "Untimed runs before the timed.", 0, settings.MOST_RUNS, short_name="w"
)
_SEED = flags.DEFINE_integer("seed", 0, "Of the random operands.", 0, (1 << 63) - 1)
_CHECK = flags.DEFINE_bool("check", True, "Compare every result with numpy's and with lax's.")
_CHAIN = flags.DEFINE_bool(
    "chain", True, "Time chains inside one program; --chain=0 times one program for each."
)
_TRACE = flags.DEFINE_string("trace", "", "Folder for JAX's profiles of what is timed.")
_DISTRIBUTED = flags.DEFINE_bool(
    "distributed",
    None,
    "Call jax.distributed.initialize() first; by default where JAX finds a cluster around it.",
)


def chosen(
    sizes: dict[str, str], pods: tuple[str, ...] = (), dtypes: tuple[str, ...] = ("float32",)
) -> Settings:
    """The flags, checked against each other and against the devices there are; JAX starts here.

    Args:
      sizes: what `--sizes` is by default, by `devices.kind()`; "replay" where there are pods.
      pods: TPUs to replay on.
      dtypes: what `--dtype` is by default.

    Raises:
      FlagError: a flag that makes no sense.
    """
    mesh = settings.parse_mesh(_MESH.value) if _MESH.value else ()
    if mesh and flags.FLAGS["devices"].present and math.prod(mesh) != _DEVICES.value:
        rule = f"--mesh={_MESH.value} is one of {math.prod(mesh)}"
        raise FlagError(f"--devices={_DEVICES.value}", rule, "leave one of both out")
    number = min(math.prod(mesh) if mesh else _DEVICES.value, settings.MOST_SIMULATED)
    devices.prepare(number, _DISTRIBUTED.value)
    mesh = mesh or (len(jax.devices()),)
    kind = devices.kind()
    _require_effect(bool(pods), kind)
    cases = settings.choose_cases(_COLLECTIVE.value)
    return Settings(
        cases=cases,
        algorithms=settings.check_algorithms(_ALGORITHM.value, cases),
        backends=_backends(kind, bool(pods)),
        dtypes=tuple(map(settings.parse_dtype, _DTYPE.value or dtypes)),
        sizes=_sizes(sizes["replay" if pods else kind]),
        mesh=mesh,
        axes=settings.parse_axis(_AXIS.value, settings.AXES if pods else mesh),
        warmup=_WARMUP.value,
        iters=timing.ITERS.value,
        seed=_SEED.value,
        check=_CHECK.value,
        chain=_CHAIN.value,
        trace=_TRACE.value,
        pods=pods,
    )


# What says how to run and time collectives on devices, and how to time them.
_RUNNING = ("mesh", "devices", "seed", "check", "distributed")
_TIMING = ("warmup", "iters", "chain")


def _require_effect(replayed: bool, kind: str) -> None:
    """Refuses flags that the run would not look at."""
    for name in (*_RUNNING, *_TIMING, "trace"):
        if replayed and flags.FLAGS[name].present:
            rule = "a replay runs on no device and measures nothing"
            raise FlagError(f"--{name}", rule, "leave out this or --replay")
        if kind == "simulated" and name in _TIMING and flags.FLAGS[name].present:
            raise FlagError(f"--{name}", "simulated devices are not timed", "leave it out")


def _backends(kind: str, replayed: bool) -> tuple[str, ...]:
    named = settings.check_backends(_BACKEND.value)
    for name in named:
        remedy = "leave it out for what the platform has"
        if replayed and name != "pallas":
            rule = "only kernels can be replayed"
        elif kind != "gpu" and name == "nccl":
            rule = "it needs NVIDIA GPUs, and JAX finds none here"
            remedy = (
                "where there are some, install JAX for them, pip install -e '.[gpu]', and unset "
                "JAX_PLATFORMS; else leave it out"
            )
        elif kind == "gpu" and name == "pallas" and not replayed:
            rule = "its kernels are for TPUs, and there are GPUs here"
        else:
            continue
        raise FlagError(f"--backend={name}", rule, remedy)
    named = named or devices.backends(kind)
    if not _COMPARE.value:
        return named
    if replayed:
        rule = "only kernels can be replayed, and lax's collectives are not kernels"
        raise FlagError("--compare=lax with --replay", rule, "leave one of them out")
    return ("xla", *(name for name in named if name != "xla"))


def sizes_are_named() -> bool:
    """Whether flags say what sizes are wanted."""
    return any((_SIZES.value, _BEGIN.value, _END.value, _FACTOR.value))


def _sizes(default: str) -> tuple[int, ...]:
    steps = (_BEGIN.value, _END.value, _FACTOR.value)
    if not any(steps):
        return settings.parse_sizes(_SIZES.value or default)
    if _SIZES.value or not _BEGIN.value:
        rule = "-b, -e and -f together say what --sizes says alone, and -b is the first size"
        raise FlagError(f"-b{steps[0]} -e{steps[1]} -f{steps[2]}", rule, "write -b 8K -e 256M -f 2")
    return settings.parse_steps(*steps)
