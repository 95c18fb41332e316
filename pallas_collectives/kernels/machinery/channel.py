"""Messages from one device to another: the protocol of all semaphores and slots that serve again.

A channel brings us messages 0, 1, 2, ... from one device, `upstream`, and by our own end of it we
send messages to one device, `downstream`: those before and behind us on a ring or a line, or any
two others. Who sends to several devices has a channel to each. Kernels say what moves:

    send(source, target, k)    message k goes downstream, as soon as it may
    receive(k, place)          message k has come, and is in its place
    release(k)                 upstream may use again what message k took: its semaphore, its slot

Who could be ahead of whom, and why no signal can pass for another:

* Upstream may be ahead of us, with several messages on the wire. If they shared a semaphore, the
  later could pass for the earlier. So message k has semaphore k modulo `window`; where messages
  arrive in slots and not in places of their own, it has slot k modulo `window` as well.
* Message k + window takes the semaphore and the slot of message k. If it came too early, it could
  pass for message k, or overwrite what we still read. So upstream waits for a credit before each
  message from number `window` on. We give one for each message that we release, in their order:
  who has taken j credits knows that the first j messages are released. (JAX's tutorial calls
  credits capacity.)
* Upstream alone signals our arrivals, downstream alone our credits, and we alone what we have sent:
  no device's signal can stand in for another's. A stream that changes neighbours, at the next axis
  of a torus, has another channel there. (In `torus.exchange` all that comes in a step is waited for
  together, on semaphores of its own: there channels give the credits alone.)
* Every semaphore ends at 0. We wait for as many bytes as come. We give credits only for messages
  whose semaphore will serve again, of `arrivals` in all: each credit is taken.

`wait_sent` waits until what was sent has left its source. When that matters is the kernel's to say:
some write over the source soon, some never.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.annotations import DeviceId, Number, Ref, Semaphore
from pallas_collectives.kernels.machinery import sync
from pallas_collectives.kernels.machinery.sync import Partners
from pallas_collectives.topology.groups import Ring, wrap_step


class Semaphores(NamedTuple):
    """The semaphores of the channels of several streams: what to allocate, or refs to it."""

    sent: Any  # (*streams): own; the bytes that have left; None where a channel has another's
    arrived: Semaphore  # (*streams, window): signalled by upstream, number k % window by message k
    # (*streams): signalled by downstream, once for each message that may follow; None where
    # messages need none
    credit: Any

    @classmethod
    def of(
        cls,
        *streams: int,
        window: int,
        sent: tuple[int, ...] | None = None,
        credits: bool = True,
    ) -> "Semaphores":
        """What to allocate for (*streams) channels; for `sent`, if some of them share it."""
        dma, regular = pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.REGULAR
        credit = regular(streams) if credits else None
        return cls(dma(sent or streams), dma((*streams, window)), credit)


@dataclasses.dataclass(frozen=True)
class Channel:
    """One stream of messages, at one device.

    Attributes:
      ring: the ring of the devices that it leads through.
      direction: how many places to the right of us downstream is, and upstream to the left.
      semaphores: those of all streams.
      index: this stream's in them.
      arrivals: how many messages come to us; None if no device knows (see `relay`).
      longest: no device has more arrivals; None as above.
      slots: a ref and this stream's index in it, where `window` slots lie in which messages arrive
        in turn: HBM or VMEM; None if messages have places of their own.
      sent: the semaphore that counts what has left; None for the stream's own.
      partners: downstream and upstream, where no direction tells them; else None.
    """

    ring: Ring
    direction: Number
    semaphores: Semaphores
    index: tuple[Number, ...]
    arrivals: Any = None
    longest: int | None = None
    slots: tuple[Ref, tuple[Number, ...]] | None = None
    sent: Semaphore | None = None
    partners: Partners | None = None

    @property
    def window(self) -> int:
        """How many messages may be on their way."""
        return self.semaphores.arrived.shape[-1]

    def slot(self, number: Number) -> Ref:
        """Where a message arrives, here and downstream."""
        assert self.slots is not None, "messages have places of their own"
        ref, index = self.slots
        return ref.at[(*index, wrap_step(number, self.window))]

    def send(self, source: Ref, target: Ref, number: Number) -> None:
        """Sends a message, as soon as it may be sent."""
        self.wait_until_free(number)
        self.push(source, target, number)

    def wait_until_free(self, number: Number) -> None:
        """Waits until downstream has released what the message will take."""
        if self._reuses:

            @pl.when(jnp.asarray(number) >= self.window)
            def _() -> None:
                pl.semaphore_wait(self.semaphores.credit.at[self.index], 1)

    def push(self, source: Ref, target: Ref, number: Number) -> None:
        """Sends a message, or one of its pieces, that may be sent."""
        sync.remote_copy(source, target, self._sent, self._arrived(number), self._downstream)

    def deliver(self, source: Ref, number: Number) -> None:
        """Has a message of our own arrive here, as if upstream had sent it."""
        pltpu.make_async_copy(source, self.slot(number), self._arrived(number)).start()

    def receive(self, number: Number, place: Ref) -> None:
        """Waits for a message, or for as many bytes of it as `place` has."""
        sync.wait(self._arrived(number), place)

    def release(self, number: Number) -> None:
        """Lets upstream send the message that follows this one; nothing for numbers below 0."""
        if self._reuses:
            followed = number >= 0
            if self.arrivals is not None:
                followed &= number + self.window < self.arrivals

            @pl.when(followed)
            def _() -> None:
                sync.signal(self.ring, self.semaphores.credit.at[self.index], self._upstream)

    def take_credits(self, times: Number) -> None:
        """Takes so many credits that no message has used."""
        credit = self.semaphores.credit.at[self.index]
        sync.for_each(0, times, lambda _: pl.semaphore_wait(credit, 1))

    def wait_sent(self, source: Ref, times: Number = 1) -> None:
        """Waits until so many messages of the size of `source` have left."""
        sync.wait(self._sent, source, times)

    @property
    def _downstream(self) -> DeviceId:
        if self.partners is None:
            return self.ring.peer(self.direction)
        return self.ring.device_id(self.partners.target)

    @property
    def _upstream(self) -> DeviceId:
        if self.partners is None:
            return self.ring.peer(-self.direction)
        return self.ring.device_id(self.partners.source)

    @property
    def _sent(self) -> Semaphore:
        return self.semaphores.sent.at[self.index] if self.sent is None else self.sent

    def _arrived(self, number: Number) -> Semaphore:
        return self.semaphores.arrived.at[(*self.index, wrap_step(number, self.window))]

    @property
    def _reuses(self) -> bool:
        return self.longest is None or self.longest > self.window
