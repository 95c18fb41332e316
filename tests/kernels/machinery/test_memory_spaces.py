"""Where XLA puts what kernels take for HBM, by the programs that it compiles ahead of time."""

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from test_compiled import call_of

import harness
import jaxprs
import pallas_collectives
from pallas_collectives.catalogue import ALGORITHMS
from pallas_collectives.errors import CollectiveError
from pallas_collectives.kernels.machinery import launch, spaces

SHAPE = (256, 256)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A call of one of our kernels: (x, w) of SHAPE, and what is behind an algorithm's name."""

    name: str
    call: Callable[[jax.Array, jax.Array, str], jax.Array]
    spaces: bool = False
    differentiable: bool = True

    def __str__(self) -> str:
        return self.name


def _collective(op: str, algorithm: str) -> Kernel:
    call, shape = call_of(op)

    def run(x: jax.Array, w: jax.Array, space: str) -> jax.Array:
        x = jnp.resize(x, shape)
        how = {"backend": "pallas", "algorithm": algorithm + space}
        return call(pallas_collectives, x, **how).reshape(-1, SHAPE[1])

    return Kernel(f"{op}_{algorithm}", run, spaces=True)


def _half_of_a_shift(x: jax.Array, w: jax.Array, space: str) -> jax.Array:
    """Some devices are nobody's target: the result aliases zeros."""
    how = {"backend": "pallas", "algorithm": "partners" + space}
    return pallas_collectives.ppermute(x, "x", [(0, 1), (2, 3)], **how)


def _all_gather_matmul(x: jax.Array, w: jax.Array, space: str) -> jax.Array:
    return pallas_collectives.all_gather_matmul(x, w, "x", algorithm="fused")


def _matmul_reduce_scatter(x: jax.Array, w: jax.Array, space: str) -> jax.Array:
    return pallas_collectives.matmul_reduce_scatter(x, w, "x", algorithm="fused")


def _gather_and_consume(x: jax.Array, w: jax.Array, space: str) -> jax.Array:
    def body(x: Any, scale: Any, one: Any, y: Any) -> None:
        y[...] = x[...] * scale[...] * one[...]

    kept = [w[:1], w[:1, :1]]
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pallas_collectives.gather_and_consume(x, body, "x", out=out, operands=kept)


def _produce_and_scatter(x: jax.Array, w: jax.Array, space: str) -> jax.Array:
    def body(x: Any, scale: Any, one: Any, term: Any) -> None:
        term[...] = x[...] * scale[...] * one[...]

    kept = [w[:1], w[:1, :1]]
    out = jax.ShapeDtypeStruct((len(x) // jax.lax.axis_size("x"), x.shape[1]), x.dtype)
    return pallas_collectives.produce_and_scatter(x, body, "x", out=out, operands=kept)


KERNELS = (
    *(_collective(op, name) for op, algorithms in ALGORITHMS.items() for name in algorithms),
    Kernel("ppermute_of_some", _half_of_a_shift, spaces=True),
    Kernel("all_gather_matmul", _all_gather_matmul),
    Kernel("matmul_reduce_scatter", _matmul_reduce_scatter),
    Kernel("gather_and_consume", _gather_and_consume, differentiable=False),
    Kernel("produce_and_scatter", _produce_and_scatter, differentiable=False),
)
# One that every generation can run.
GATHER = next(kernel for kernel in KERNELS if kernel.name == "all_gather_line")


def _refit(y: jax.Array) -> jax.Array:
    """Any rows as SHAPE."""
    return y[: SHAPE[0]] if len(y) >= SHAPE[0] else jnp.tile(y, (SHAPE[0] // len(y), 1))


def _step(kernels: Sequence[Kernel], space: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """All kernels one after the other, between products."""
    for kernel in kernels:
        y = kernel.call(jnp.tanh(x @ w), w, space)
        x = _refit(jnp.tanh(y @ w))
    return x


def _inside(kernels: Sequence[Kernel], x: jax.Array, w: jax.Array) -> jax.Array:
    return _step(kernels, "", x, w)


def _in_vmem(kernels: Sequence[Kernel], x: jax.Array, w: jax.Array) -> jax.Array:
    return _step([k for k in kernels if k.spaces], ":vmem", x, w)


def _edges(kernels: Sequence[Kernel], x: jax.Array, w: jax.Array) -> list[jax.Array]:
    """The program's operands are the kernels', and its results are theirs."""
    return [kernel.call(x, w, "") for kernel in kernels]


def _scan(kernels: Sequence[Kernel], x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, w: (_step(kernels, "", x, w), None), x, jnp.stack([w] * 3))[0]


def _remat(kernels: Sequence[Kernel], x: jax.Array, w: jax.Array) -> jax.Array:
    """A scan of layers whose kernels run again on the way back."""
    kernels = [kernel for kernel in kernels if kernel.differentiable]

    @jax.checkpoint
    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return _step(kernels, "", x, w), None

    return jax.grad(lambda w: jax.lax.scan(layer, x, jnp.stack([w] * 2))[0].sum())(w)


Form = Callable[[Sequence[Kernel], jax.Array, jax.Array], Any]
FORMS: dict[str, Form] = {
    "inside": _inside,
    "in_vmem": _in_vmem,
    "edges": _edges,
    "scan": _scan,
    "remat": _remat,
}


def _in_turn() -> Iterator[tuple[str, str, tuple[Kernel, ...]]]:
    """Any two of kernel, generation and form meet: a square of them."""
    for j, generation in enumerate(harness.GENERATIONS):
        for k, form in enumerate(FORMS):
            chosen = (kernel for i, kernel in enumerate(KERNELS) if (i + j + k) % len(FORMS) == 0)
            yield generation, form, tuple(chosen)


def _on(generation: str) -> Mesh:
    # Four devices along "x": on v5e those of a square, round which a ring goes within its reach.
    topology = "v5e:2x2" if generation == "v5e" else harness.GENERATIONS[generation]
    devices = np.array(harness._topology(topology).devices)
    return Mesh(devices.reshape(4, -1), ("x", "y"))


def _traced(on: Mesh, fn: Callable[..., Any], *shapes: tuple[int, ...]) -> Any:
    """The program of fn of (device's x, w), w the same everywhere."""
    spec = P(on.axis_names)
    shard = jax.shard_map(
        lambda x, w: jax.tree.map(lambda y: y[None], fn(x[0], w)),
        mesh=on,
        in_specs=(spec, P()),
        out_specs=spec,
        check_vma=False,
    )
    x, w = shapes
    return jax.jit(shard).trace(
        jax.ShapeDtypeStruct((on.size, *x), jnp.float32, sharding=NamedSharding(on, spec)),
        jax.ShapeDtypeStruct(w, jnp.float32, sharding=NamedSharding(on, P())),
    )


def _compiled(generation: str, form: str, kernels: Sequence[Kernel]) -> str:
    """The compiled program's text, with the kernels that v5e can run."""
    on = _on(generation)
    if generation == "v5e":
        kernels = [kernel for kernel in kernels if _reaches(on, kernel)]
        if not kernels:
            pytest.skip("none of these kernels is within v5e's reach")
    return _text(on, functools.partial(FORMS[form], kernels), SHAPE)


def _text(on: Mesh, fn: Callable[..., Any], shape: tuple[int, ...]) -> str:
    return _traced(on, fn, shape, SHAPE).lower().compile().as_text()


def _reaches(on: Mesh, kernel: Kernel) -> bool:
    try:
        _traced(on, lambda x, w: kernel.call(x, w, ""), SHAPE, SHAPE).lower()
    except CollectiveError as error:
        assert "power-of-two" in str(error)
        return False
    return True


@dataclasses.dataclass(frozen=True)
class Call:
    """A kernel in a compiled program: the memory of each operand and result that is not in HBM."""

    name: str
    elsewhere: tuple[str, ...]


_CALL = re.compile(r'^.* custom-call\((.*?)\), custom_call_target="tpu_custom_call"', re.MULTILINE)
_DEFINED = re.compile(r"^\s+(?:ROOT )?(%\S+) = (.*?) ([a-z][\w\-]*)\(", re.MULTILINE)


def _calls(text: str) -> list[Call]:
    types = {name: type_ for name, type_, _ in _DEFINED.findall(text)}
    calls = []
    for match in _CALL.finditer(text):
        name = match[0].split(" = ")[0].split()[-1]
        operands = re.findall(r"%[\w.\-]+", match[1])
        everything = "".join(types[array] for array in (name, *operands))
        calls.append(Call(name, tuple(re.findall(r"S\(\d\)", everything))))
    return calls


def _check(generation: str, form: str, kernels: Sequence[Kernel]) -> None:
    calls = _calls(_compiled(generation, form, kernels))
    assert calls
    assert not [call for call in calls if call.elsewhere]


@pytest.mark.full
@pytest.mark.parametrize("generation, form, kernels", [*_in_turn()])
def test_kernels_find_in_hbm_what_they_take_for_it(
    generation: str, form: str, kernels: tuple[Kernel, ...]
) -> None:
    _check(generation, form, kernels)


@pytest.mark.slow  # the whole product of kernels, generations and forms
@pytest.mark.parametrize("generation", harness.GENERATIONS)
@pytest.mark.parametrize("form", FORMS)
def test_all_kernels_find_in_hbm_what_they_take_for_it(generation: str, form: str) -> None:
    _check(generation, form, KERNELS)


def test_every_two_of_kernel_generation_and_form_meet() -> None:
    met = [(k.name, generation, form) for generation, form, ks in _in_turn() for k in ks]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        pairs = {(row[one], row[other]) for row in met}
        assert len(pairs) == len({a for a, _ in pairs}) * len({b for _, b in pairs})


@pytest.mark.parametrize("generation, memory", [("v4", "S(3)"), ("v5e", "S(1)")])
def test_xla_would_put_it_elsewhere(
    monkeypatch: pytest.MonkeyPatch, generation: str, memory: str
) -> None:
    monkeypatch.setattr(spaces, "operand", lambda x: x)
    monkeypatch.setattr(spaces, "results", list)
    (call,) = _calls(_compiled(generation, "inside", [GATHER]))
    assert memory in call.elsewhere


@pytest.mark.parametrize("generation", ["v4", "v6e"])
def test_what_lies_in_hbm_anyway_is_not_copied(
    monkeypatch: pytest.MonkeyPatch, generation: str
) -> None:
    """Arrays larger than any VMEM or CMEM: no instruction that is not there without constraints."""

    def program(x: jax.Array, w: jax.Array) -> jax.Array:
        for kernel in (KERNELS[0], KERNELS[5], KERNELS[-5]):  # of some: it aliases
            x = jnp.resize(jnp.tanh(kernel.call(jnp.tanh(x * 2), w, "")), x.shape)
        return x

    def instructions() -> collections.Counter[str]:
        text = _text(_on(generation), program, (256 << 10, 256))
        return collections.Counter(op for _, _, op in _DEFINED.findall(text))

    bound = instructions()
    monkeypatch.setattr(spaces, "operand", lambda x: x)
    monkeypatch.setattr(spaces, "results", list)
    free = instructions()
    assert bound["custom-call"] == free["custom-call"] >= 3
    assert bound <= free


@pytest.mark.full
def test_kernels_read_all_that_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operand is read, or is what a result begins as; no kernel asks how large its grid is."""
    found: list[Any] = []
    pallas_call = launch.pl.pallas_call

    def recording(*args: Any, **options: Any) -> Callable[..., Any]:
        call = pallas_call(*args, **options)

        def run(*arrays: jax.Array) -> Any:
            jaxpr, results = jax.make_jaxpr(call, return_shape=True)(*arrays)
            found.append(jaxpr.eqns[-1])
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), results)

        return run

    monkeypatch.setattr(launch.pl, "pallas_call", recording)
    for space in ("", ":vmem"):
        _traced(_on("v6e"), functools.partial(_separately, space), SHAPE, SHAPE).lower()
    assert len(found) > 2 * len(ALGORITHMS)
    for eqn in found:
        assert eqn.primitive.name == "pallas_call"
        kernel, aliased = eqn.params["jaxpr"], dict(eqn.params["input_output_aliases"])
        read = {var for inner in kernel.eqns for var in inner.invars if isinstance(var, core.Var)}
        names = [i for i, var in enumerate(kernel.invars[: len(eqn.invars)]) if var not in read]
        assert set(names) <= set(aliased), eqn.params["name"]
        assert "num_programs" not in jaxprs.primitives_in(kernel)


def _separately(space: str, x: jax.Array, w: jax.Array) -> list[jax.Array]:
    return [kernel.call(x, w, space) for kernel in KERNELS if kernel.spaces or not space]


@pytest.mark.parametrize("generation", ["v5e", "7x"])
def test_xla_neither_drops_nor_moves_what_other_devices_wait_for(generation: str) -> None:
    """What one device alone reads, all gather; equal calls are one, as for lax's collectives."""

    def gather(x: jax.Array, w: jax.Array) -> jax.Array:
        return GATHER.call(jnp.tanh(x @ w), w, "")

    def program(x: jax.Array, w: jax.Array) -> jax.Array:
        y, again = gather(x, w), gather(x, w)
        gather(x * 2, w)  # nobody reads it
        first = jax.lax.axis_index("x") == 0
        y = jax.lax.cond(first, lambda: jnp.tanh(y @ w), lambda: jnp.zeros_like(y))
        return y + again.sum()

    text = _text(_on(generation), program, SHAPE)
    assert " conditional(" in text
    assert len(_calls(text)) == len(_calls("ENTRY" + text.split("ENTRY")[1])) == 1


@pytest.mark.parametrize("generation", ["v5e", "7x"])
def test_a_kernel_in_a_loop_is_one_call(generation: str) -> None:
    """In the loop, or before it where each turn would gather the same: on all devices alike."""

    def program(x: jax.Array, w: jax.Array) -> jax.Array:
        def step(_: Any, y: jax.Array) -> jax.Array:
            same = GATHER.call(x, w, "")
            other = GATHER.call(y, w, "")
            return jnp.tanh((same + other)[: len(x)] @ w)

        return jax.lax.fori_loop(0, 5, step, x)

    text = _text(_on(generation), program, SHAPE)
    assert len(_calls(text)) == 2
    assert len(_calls("ENTRY" + text.split("ENTRY")[1])) <= 1
