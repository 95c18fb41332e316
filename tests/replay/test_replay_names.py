"""What refs are called, by how the kernel's author takes them; whose lines count."""

import functools
from typing import Any, NamedTuple

import jax
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives import _compat
from pallas_collectives.replay import lines, names

DMA = pltpu.SemaphoreType.DMA


class Record(NamedTuple):
    sent: Any
    arrived: Any


def plain(x_ref: Any, o_ref: Any, send_sem: Any, recv_sem: Any) -> None:
    pltpu.async_copy(x_ref, o_ref, send_sem).wait()


def unpacks(*refs: Any) -> None:
    x_ref, o_ref, send_sem, recv_sem = refs
    pltpu.async_copy(x_ref, o_ref, send_sem).wait()
    pltpu.async_copy(x_ref, o_ref, recv_sem).wait()


def unpacks_the_rest(x_ref: Any, *rest: Any) -> None:
    o_ref = rest[0]
    send_sem, recv_sem = rest[1:]
    pltpu.async_copy(x_ref, o_ref, send_sem).wait()
    pltpu.async_copy(x_ref, o_ref, recv_sem).wait()


def takes_a_record(x_ref: Any, o_ref: Any, sems: Any) -> None:
    pltpu.async_copy(x_ref, o_ref, sems.sent).wait()


def unpacks_a_record(*refs: Any) -> None:
    x_ref, o_ref, sems = refs
    pltpu.async_copy(x_ref, o_ref, sems.sent).wait()


def with_a_size(n: int, x_ref: Any, o_ref: Any, send_sem: Any, recv_sem: Any) -> None:
    pltpu.async_copy(x_ref, o_ref, send_sem).wait()


PLAIN = ["x_ref", "o_ref", "send_sem", "recv_sem"]
OF_RECORD = ["x_ref", "o_ref", "sems.sent", "sems.arrived"]


def kernels_of(kernel: Any, scratch: Any) -> Any:
    """The equation of a call of the kernel."""
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    shape = jax.ShapeDtypeStruct((8, 128), "float32")

    def call(x: Any) -> Any:
        return pl.pallas_call(
            kernel, out_shape=shape, in_specs=[anywhere], out_specs=anywhere, scratch_shapes=scratch
        )(x)

    jaxpr = jax.make_jaxpr(call)(shape).jaxpr
    (eqn,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "pallas_call")
    return eqn


@pytest.mark.parametrize(
    ("kernel", "scratch", "called"),
    [
        (plain, [DMA, DMA], PLAIN),
        (functools.partial(with_a_size, 4), [DMA, DMA], PLAIN),
        (lambda *refs: with_a_size(4, *refs), [DMA, DMA], PLAIN),
        (unpacks, [DMA, DMA], PLAIN),
        (unpacks_the_rest, [DMA, DMA], PLAIN),
        (takes_a_record, [Record(DMA, DMA)], OF_RECORD),
        (unpacks_a_record, [Record(DMA, DMA)], OF_RECORD),
    ],
)
def test_refs_are_called_what_their_author_calls_them(
    kernel: Any, scratch: Any, called: list[str]
) -> None:
    assert names.of_refs(kernels_of(kernel, scratch).params["jaxpr"]) == called


def test_what_has_no_name_to_be_found_keeps_its_number() -> None:
    def nameless(*refs: Any) -> None:
        pltpu.async_copy(refs[0], refs[1], refs[2]).wait()

    found = names.of_refs(kernels_of(nameless, [DMA]).params["jaxpr"])
    assert found == ["refs[0]", "refs[1]", "refs[2]"]


def test_lines_are_the_readers_and_a_loops_body_has_the_line_around_it() -> None:
    def kernel(x_ref: Any, o_ref: Any, sem: Any) -> None:
        def tile(a_ref: Any, b_ref: Any) -> None:
            b_ref[...] = a_ref[...]

        spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
        pltpu.emit_pipeline(tile, grid=(1,), in_specs=[spec], out_specs=[spec])(x_ref, o_ref)

    jaxpr = kernels_of(kernel, [DMA]).params["jaxpr"]
    known = lines.Lines()
    found: dict[str, set[str]] = {}

    def visit(jaxpr: Any) -> None:
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        known.enter(jaxpr)
        for eqn in jaxpr.eqns:
            line = known.of(eqn)
            found.setdefault(eqn.primitive.name, set()).add(f"{line.path} {line.function}")
            for inner in _compat.jaxprs_of(eqn):
                visit(inner)

    visit(jaxpr)
    assert found["dma_start"] == found["dma_wait"] == {f"{__file__} kernel"}
    assert found["get"] == {f"{__file__} tile"}
