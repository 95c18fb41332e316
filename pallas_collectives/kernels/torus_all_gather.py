"""All-gather over all axes of a torus at once; see `torus` for who sends what when.

             steps           bytes sent per link and direction   scratch
    torus    sum of n_a - 1  (n-1)/(2d) blocks                   none

A phase's hop moves all that the phases before have brought, straight from its place in our result
to its place in our neighbour's.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.kernels import launch, sync, torus, torus_devices, torus_timetable
from pallas_collectives.kernels.topology import Group, Ring, wrap_step
from pallas_collectives.kernels.torus import Plan
from pallas_collectives.kernels.torus_devices import Field

# Receive semaphores of a stream and phase: how many hops a fast neighbour may be ahead. A kernel
# has some 500 semaphores.
WINDOW = 16
_SEMAPHORES = 256


def all_axes(x: jax.Array, group: Group, *, axis: int, vmem: bool, interpret: Any) -> jax.Array:
    """Gathers x along `axis`; `axis` must be `sliceable` for x's shape."""
    axes = torus_devices.axes_of(group)
    view = torus.View.of(x.shape, axis, x.dtype)
    both = torus.differ(axes)
    plan = Plan.of(axes, view.block, view.at, x.dtype, chunks=1 + both, both=both)
    y = launch.call(
        functools.partial(_kernel, axes=axes, plan=plan),
        torus_devices.launch_group(group),
        view.into(x, (1,) * len(axes)),
        scalars=torus_devices.tables(axes),
        out_shape=jax.ShapeDtypeStruct(plan.shape(torus_devices.field_sizes(axes)), x.dtype),
        scratch_shapes=[semaphores(plan)[0], *semaphores(plan)],
        barrier=torus_devices.barrier_key(group),
        name="all_gather_torus",
        interpret=interpret,
        vmem=vmem,
        wire_bytes=(group.size - 1) * x.nbytes,
    )
    return view.out_of(y, plan.sizes)


def semaphores(plan: Plan) -> list[Any]:
    """The send, receive and credit semaphores that `Gather` takes."""
    bundles, phases = len(plan.bundles), len(plan.sizes)
    streams = max(bundle.streams for bundle in plan.bundles)
    window = max(2, min(WINDOW, _SEMAPHORES // (bundles * phases * streams), max(plan.sizes) - 1))
    dma, regular = pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.REGULAR
    every = bundles, phases, streams
    return [dma((bundles, streams)), dma((*every, window)), regular(every)]


def _kernel(
    _: Ring,
    *refs: Any,  # `torus_devices.tables`, then
    # x_ref: one block, with dimensions of 1 for the torus: HBM or VMEM
    # o_ref: all blocks: HBM or VMEM
    # copy_sems: (bundles, streams): own; the own block's way into the result
    # semaphores: see Gather
    axes: Sequence[Group],
    plan: Plan,
) -> None:
    rings, numbers, (x_ref, o_ref, copy_sems, *semaphores) = torus_devices.seen(axes, refs)
    sync.barrier_with_neighbours(*rings)
    field = Field(plan, o_ref, numbers)
    gather = Gather(plan, rings, field, *semaphores, own=(x_ref, copy_sems))
    torus_timetable.run(plan, (gather, range(len(rings))))


class Gather:
    """A `torus_timetable.Stage`: sends the own block and what arrives on, until all is there.

    Each stream's hop has a receive semaphore of its own in its phase. A neighbour upstream may be
    hops ahead; and upstream in the next phase is another device, which may be there while we are
    in this one: on a shared semaphore what it sends could pass for what we wait for. On axes of
    more than `WINDOW` hops semaphores serve again, under credits: upstream sends hop t only once we
    have received hop t - WINDOW. All credits are used. Credits of one phase come from one device.
    """

    def __init__(
        self,
        plan: Plan,
        rings: Sequence[Ring],
        field: Field,  # the result; the own block is there, those of the others are filled
        send_sems: Any,  # (bundles, streams): own; all sends of a stream, drained at the end
        recv_sems: Any,  # (bundles, phases, streams, window): signalled by upstream, in turn
        credit_sems: Any,  # (bundles, phases, streams): signalled by downstream on long axes
        *,
        own: tuple[Any, Any] | None = None,  # the own block and, as send_sems, its copies' sems
    ) -> None:
        """Without `own` the own block is in the result."""
        self._plan, self._rings, self._field = plan, rings, field
        self._send_sems, self._recv_sems, self._credit_sems = send_sems, recv_sems, credit_sems
        self._own = own

    def begin(self, b: int, phase: int, stream: Any) -> None:
        if phase == 0:
            if self._own:
                self._send(b, phase, 0, stream, self._own_piece(b, stream))
                self._copy_own(b, stream, lambda copy: copy.start())
            else:
                self._send(b, phase, 0, stream)
            return
        self._receive(b, phase - 1, self._hops(b, phase - 1) - 1, stream)
        if phase == 1 and self._own:
            self._copy_own(
                b, stream, lambda copy: copy.wait()
            )  # what goes along the second axis holds it
        self._send(b, phase, 0, stream)

    def go_on(self, b: int, phase: int, hop: Any, stream: Any) -> None:
        self._receive(b, phase, hop - 1, stream)
        self._send(b, phase, hop, stream)

    def end(self, b: int, stream: Any) -> None:
        last = len(self._rings) - 1
        self._receive(b, last, self._hops(b, last) - 1, stream)
        if last == 0 and self._own:
            self._copy_own(b, stream, lambda copy: copy.wait())
        for phase in range(last + 1):
            drain = functools.partial(self._sent, b, stream, self._hops(b, phase))
            self._for_each_piece(b, phase, 0, stream, drain)

    def _sent(self, b: int, stream: Any, times: int, piece: Any) -> None:
        sync.wait(self._send_sems.at[b, stream], piece, times)

    def _own_piece(self, b: int, stream: Any) -> Any:
        assert self._own, "the own block is in the result already"
        return self._plan.piece(self._own[0], [0] * len(self._rings), self._plan.bundles[b], stream)

    def _copy_own(self, b: int, stream: Any, do: Callable[[Any], None]) -> None:
        assert self._own, "the own block is in the result already"
        source, sem = self._own_piece(b, stream), self._own[1].at[b, stream]

        def copy(target: Any) -> None:
            do(pltpu.make_async_copy(source, target, sem))

        self._for_each_piece(b, 0, 0, stream, copy)

    def _hops(self, b: int, phase: int) -> int:
        return self._plan.hops(self._plan.bundles[b], phase)

    def _ring(self, b: int, phase: int) -> Ring:
        return self._rings[self._plan.bundles[b].order[phase]]

    def _for_each_piece(
        self, b: int, phase: int, hop: Any, stream: Any, body: Callable[[Any], None]
    ) -> None:
        """body(piece) for all that we send at a hop: what was there at first, then what came."""
        bundle = self._plan.bundles[b]
        place: list[Any] = [ring.me for ring in self._rings]
        for axis in bundle.order[:phase]:
            place[axis] = None
        back = -torus.direction_of(stream) * hop
        place[bundle.order[phase]] = self._ring(b, phase).block(back)
        self._field.for_each_piece(place, bundle, stream, lambda piece, _: body(piece))

    def _send(self, b: int, phase: int, hop: Any, stream: Any, source: Any = None) -> None:
        window = self._recv_sems.shape[-1]
        if self._hops(b, phase) > window:

            @pl.when(jnp.asarray(hop) >= window)
            def _() -> None:
                pl.semaphore_wait(self._credit_sems.at[b, phase, stream], 1)

        arrived = self._recv_sems.at[b, phase, stream, wrap_step(hop, window)]
        downstream = self._ring(b, phase).peer(torus.direction_of(stream))
        sent = self._send_sems.at[b, stream]

        def push(piece: Any) -> None:
            sync.remote_copy(source or piece, piece, sent, arrived, downstream)

        self._for_each_piece(b, phase, hop, stream, push)

    def _receive(self, b: int, phase: int, hop: Any, stream: Any) -> None:
        window = self._recv_sems.shape[-1]
        arrived = self._recv_sems.at[b, phase, stream, wrap_step(hop, window)]
        self._for_each_piece(b, phase, hop + 1, stream, lambda piece: sync.wait(arrived, piece))
        if self._hops(b, phase) > window:

            @pl.when(jnp.asarray(hop + window) < self._hops(b, phase))
            def _() -> None:
                upstream = self._ring(b, phase).peer(-torus.direction_of(stream))
                pl.semaphore_signal(self._credit_sems.at[b, phase, stream], 1, device_id=upstream)
