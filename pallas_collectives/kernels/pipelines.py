"""Two pipelines of hops and work inside a kernel: each hides the wire behind what the core does.

`gather_and_consume`: an all-gather in which every part of a block is consumed as it arrives, while
the parts behind it are on the wire. On a ring of 4, with two parts a block (' a half):

    step  receives and sends on            consumes meanwhile
    0     own > <                          own
    1     from the left, from the right    those two
    2     opposite ' from either side      the opposite

`produce_and_scatter`: the same backwards. A device produces its term of a block just before the
hop that carries the block's sum, adds what has come, and sends it; the wire moves one sum while the
term of the next is being produced. The own block's term comes last:

    step  produces                         sends
    0     opposite ' for either side       those
    1     right's, left's                  with what came
    2     own                              -, adds what came from both sides

Both go both ways round (`topology.lanes`): bytes and hops are those of `all_gather` and
`reduce_scatter`. The wire is hidden wherever a part takes longer to consume or produce than to
send; the other way round the work is hidden, but for one part's.

There is one call of `consume`, and one or two of `produce`, in the kernel's code: steps, parts and
lanes are loops, and whether a lane has anything to do is the trip count of a loop within.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.kernels import all_gather, reduce_scatter, sync, topology
from pallas_collectives.kernels.blocks import Blocks
from pallas_collectives.kernels.reduce_scatter import SLOTS
from pallas_collectives.kernels.topology import Lane, Ring, wrap_step


class Lanes:
    """The lanes of a ring, by a number known only in the kernel."""

    def __init__(self, ring: Ring, lanes: tuple[Lane, ...]) -> None:
        self.ring = ring
        self.count = len(lanes)
        self.parts = lanes[0].parts
        self.hops = max(lane.hops for lane in lanes)
        self._lanes = lanes

    def of(self, lane: Any, value: Callable[[Lane], int]) -> Any:
        """A lane's value."""
        values = [value(each) for each in self._lanes]
        return values[0] if len(set(values)) == 1 else jnp.where(lane == 0, *values)

    def hops_of(self, lane: Any, part: Any) -> Any:
        """How many hops a part travels on a lane."""
        start, stop = self.of(lane, lambda each: each.far[0]), self.of(lane, lambda e: e.far[1])
        is_far = (start <= part) & (part < stop)
        return self.of(lane, lambda each: each.near) + _as_int(is_far)

    def upstream(self, lane: Any, distance: Any = 1) -> Any:
        """The position `distance` hops upstream, from where blocks come."""
        return self.ring.block(-self.of(lane, lambda each: each.direction) * distance)

    def downstream(self, lane: Any, distance: Any = 1) -> Any:
        """The position `distance` hops downstream."""
        return self.ring.block(self.of(lane, lambda each: each.direction) * distance)

    def for_each(self, active: Callable[[Any], Any], body: Callable[[Any], None]) -> None:
        """body(lane) for every lane that is active; where any is, the last or the first is."""
        first, last = (_as_int(active(i)) for i in (0, self.count - 1))
        stop = self.count if self.count == 1 else self.count - 1 + last
        lax.fori_loop(1 - first, stop if self.count > 1 else first * stop, _each(body), None)

    def in_turn(self, index: Any) -> Any:
        """The part at an index in the order in which parts are seen to.

        The opposite device's parts come from either side: one from here, one from there.
        """
        half = self.parts // 2
        if self.parts < 2 or self._lanes[0].far[1] in (0, self.parts):
            return index
        return lax.div(index, np.int32(2)) + lax.rem(index, np.int32(2)) * half


def _as_int(flag: Any) -> Any:
    return int(flag) if isinstance(flag, bool) else flag.astype(np.int32)


def _each(body: Callable[[Any], None]) -> Callable[[Any, None], None]:
    return lambda index, _: body(index)


def gather_semaphores(lanes: tuple[Lane, ...]) -> list[Any]:
    """The copy, send, receive and credit semaphores that `gather_and_consume` takes."""
    copies = pltpu.SemaphoreType.DMA((lanes[0].parts,))
    return [copies, *all_gather.lane_semaphores(lanes)]


def gather_and_consume(
    ring: Ring,
    x_ref: Any,  # own block: HBM
    gathered_ref: Any,  # n blocks: HBM; all are filled
    copy_sems: Any,  # (parts,): own; one copy each, waited for when the part is consumed
    send_sems: Any,  # (lanes, parts): own; all sends of a part, drained at the end
    recv_sems: Any,  # (lanes, parts, window): signalled by the neighbour upstream, in turn
    credit_sems: Any,  # (lanes, parts): signalled by the neighbour downstream on long rings
    *,
    consume: Callable[[Any, Any], None],
    blocks: Blocks,
    lanes: tuple[Lane, ...],
    prepare: Callable[[], None] = lambda: None,  # runs when the first sends are under way
) -> None:
    """Gathers all blocks, and calls consume(block, part) for each part once it is in its place.

    Waits are as in `all_gather.pass_on`: a step's receive has a semaphore of its own, for our
    upstream neighbour may be steps ahead while we still consume; on rings of more hops than
    semaphores it sends step s only once we have received step s-window. Nothing in `gathered_ref`
    is written twice, so a neighbour that is ahead cannot write over what is being consumed.
    """
    window = recv_sems.shape[-1]
    moving = Lanes(ring, lanes)

    def place(step: Any, lane: Any, part: Any) -> Any:
        """Where we keep what we send at `step`: own first, then what came from upstream."""
        return blocks.at(gathered_ref, moving.upstream(lane, step), part)

    def send(source: Any, step: Any, lane: Any, part: Any) -> None:
        if moving.hops > window:

            @pl.when(step >= window)
            def _() -> None:
                pl.semaphore_wait(credit_sems.at[lane, part], 1)

        arrived = recv_sems.at[lane, part, wrap_step(step, window)]
        to = ring.device_id(moving.downstream(lane))
        sync.remote_copy(source, place(step, lane, part), send_sems.at[lane, part], arrived, to)

    def receive(step: Any, lane: Any, part: Any) -> None:
        # What our neighbour sends at this step is what we send at the next.
        sync.wait(recv_sems.at[lane, part, wrap_step(step, window)], place(step + 1, lane, part))
        if moving.hops > window:

            @pl.when(step + window < moving.hops_of(lane, part))
            def _() -> None:
                from_ = ring.device_id(moving.upstream(lane))
                pl.semaphore_signal(credit_sems.at[lane, part], 1, device_id=from_)

    def own_copy(part: Any) -> Any:
        target = blocks.at(gathered_ref, ring.me, part)
        return pltpu.make_async_copy(blocks.at(x_ref, part=part), target, copy_sems.at[part])

    def set_out(index: Any) -> None:
        part = moving.in_turn(index)
        moving.for_each(
            lambda lane: moving.hops_of(lane, part) > 0,
            lambda lane: send(blocks.at(x_ref, part=part), np.int32(0), lane, part),
        )

    # Of the own parts half set out at once, and one more with each that is consumed: parts that are
    # on a wire together share it, and all would arrive late.
    ahead = max(1, moving.parts // 2)

    def see_to_own(index: Any) -> None:
        topology.only_if(index + ahead < moving.parts, lambda: set_out(index + ahead))
        own_copy(moving.in_turn(index)).wait()
        following = jnp.minimum(index + 1, moving.parts - 1)
        copies_on = index + 1 < moving.parts
        topology.only_if(copies_on, lambda: own_copy(moving.in_turn(following)).start())

    def see_to(step: Any, index: Any) -> None:
        part = moving.in_turn(index)

        def arrives(lane: Any) -> Any:
            return (step > 0) & (step <= moving.hops_of(lane, part))

        def relay(lane: Any) -> None:
            receive(step - 1, lane, part)
            onward = step < moving.hops_of(lane, part)
            topology.only_if(onward, lambda: send(place(step, lane, part), step, lane, part))

        topology.only_if(step == 0, lambda: see_to_own(index))
        moving.for_each(arrives, relay)
        moving.for_each(
            lambda lane: arrives(lane) | ((step == 0) & (lane == 0)),
            lambda lane: consume(moving.upstream(lane, step), part),
        )

    def drain(part: Any) -> None:
        def sent(lane: Any) -> None:
            hops = moving.hops_of(lane, part)
            sync.wait(send_sems.at[lane, part], blocks.at(x_ref, part=part), times=hops)

        sync.for_each(0, moving.count, sent)

    sync.barrier_with_neighbours(ring)
    with jax.named_scope("own_block"):
        sync.for_each(0, ahead, set_out)
        own_copy(moving.in_turn(np.int32(0))).start()
        prepare()
    with jax.named_scope("consume"):
        _for_each_part(moving, moving.hops + 1, see_to)
    with jax.named_scope("drain"):
        sync.for_each(0, moving.parts, drain)


def sum_slots(lanes: tuple[Lane, ...], blocks: Blocks, dtype: Any) -> jax.ShapeDtypeStruct:
    """The slots that `produce_and_scatter` takes: those of sums that arrive, and one to set out."""
    return jax.ShapeDtypeStruct((len(lanes), blocks.parts, SLOTS + 1, *blocks.part_shape), dtype)


def scatter_semaphores(lanes: tuple[Lane, ...]) -> list[Any]:
    """The send, receive and credit semaphores that `produce_and_scatter` takes."""
    return reduce_scatter.lane_semaphores(lanes)


def produce_and_scatter(
    ring: Ring,
    o_ref: Any,  # own block of the result: HBM
    slots_ref: Any,  # see sum_slots: HBM; all but the last are written by upstream neighbours
    send_sems: Any,  # (lanes, parts): own; one send in flight at a time
    recv_sems: Any,  # (lanes, parts, SLOTS): signalled by upstream, once per use of the slot
    credit_sems: Any,  # (lanes, parts): signalled by downstream, once per slot that it frees
    *,
    produce: Callable[..., None],
    finish: Callable[..., None],
    blocks: Blocks,
    lanes: tuple[Lane, ...],
    prepare: Callable[[], None] = lambda: None,  # runs before anything else
) -> None:
    """Sends each block's sum towards its owner, producing our terms on the way.

    produce(block, part, sum_ref, adds) adds our term to the sum in `sum_ref` if `adds`, and else
    puts it there. finish(part, target_ref, *sum_refs) writes the sum of our own term and of what
    has come.

    Slots, semaphores and credits are used as in `reduce_scatter.add_on_the_way`: neighbouring steps
    have a slot each, for upstream may be a step ahead; step s+SLOTS needs a credit, given once our
    send from the slot of step s has ended. Terms of step 0 set out from a slot that nobody else
    writes to.
    """
    moving = Lanes(ring, lanes)

    def slot(step: Any, lane: Any, part: Any) -> Any:
        return slots_ref.at[lane, part, wrap_step(step, SLOTS)]

    def receive(step: Any, lane: Any, part: Any) -> None:
        arrived = slot(step, lane, part)
        sync.wait(recv_sems.at[lane, part, wrap_step(step, SLOTS)], arrived)

    def forward(step: Any, lane: Any, part: Any) -> None:
        hops = moving.hops_of(lane, part)

        def take_over() -> None:
            receive(step - 1, lane, part)
            # The send of step - 1, for we have waited for those before it.
            sync.wait(send_sems.at[lane, part], slot(step - 1, lane, part))

            @pl.when((step >= 2) & (step - 2 + SLOTS < hops))
            def _() -> None:
                from_ = ring.device_id(moving.upstream(lane))
                pl.semaphore_signal(credit_sems.at[lane, part], 1, device_id=from_)

        topology.only_if(step > 0, take_over)
        where = jnp.where(step == 0, SLOTS, wrap_step(jnp.maximum(step - 1, 0), SLOTS))
        held = slots_ref.at[lane, part, where]
        produce(moving.downstream(lane, hops - step), part, held, step > 0)

        @pl.when(step >= SLOTS)
        def _() -> None:
            pl.semaphore_wait(credit_sems.at[lane, part], 1)

        arrived = recv_sems.at[lane, part, wrap_step(step, SLOTS)]
        to = ring.device_id(moving.downstream(lane))
        target = slot(step, lane, part)
        sync.remote_copy(held, target, send_sems.at[lane, part], arrived, to)

    def see_to(step: Any, index: Any) -> None:
        part = moving.in_turn(index)
        moving.for_each(
            lambda lane: step < moving.hops_of(lane, part),
            lambda lane: forward(step, lane, part),
        )

    def finish_part(index: Any) -> None:
        part = moving.in_turn(index)
        target = blocks.at(o_ref, part=part)

        def last(lane: Any) -> Any:
            hops = moving.hops_of(lane, part)
            receive(hops - 1, lane, part)
            return slot(hops - 1, lane, part)

        if all(lane.near for lane in lanes):
            finish(part, target, *(last(lane) for lane in range(moving.count)))
        else:  # two devices: each part comes on one lane
            moving.for_each(
                lambda lane: moving.hops_of(lane, part) > 0,
                lambda lane: finish(part, target, last(lane)),
            )

    def drain(part: Any) -> None:
        moving.for_each(
            lambda lane: moving.hops_of(lane, part) > 0,
            lambda lane: sync.wait(send_sems.at[lane, part], slot(0, lane, part)),
        )

    with jax.named_scope("prepare"):
        prepare()
    sync.barrier_with_neighbours(ring)
    with jax.named_scope("produce"):
        _for_each_part(moving, moving.hops, see_to)
    with jax.named_scope("finish"):
        sync.for_each(0, moving.parts, finish_part)
        sync.for_each(0, moving.parts, drain)


def _for_each_part(moving: Lanes, steps: int, body: Callable[[Any, Any], None]) -> None:
    """body(step, index of a part), step by step."""
    sync.for_each(0, steps, lambda step: sync.for_each(0, moving.parts, lambda i: body(step, i)))
