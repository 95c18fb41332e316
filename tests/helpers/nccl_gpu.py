"""Runs collectives on real GPUs for the tests: raw calls on streams, and calls inside jit."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

from pallas_collectives.nccl import ffi

P = jax.sharding.PartitionSpec


class UnderWay:
    """Calls under way on this process's ranks; `results` waits for them."""

    def __init__(self, group, inputs, outputs, call):
        """inputs, outputs: rank -> numpy array, rank -> (shape, dtype); call: what each rank does,
        with (communicator, input address, output address, stream)."""
        self.group = group
        driver = group.runtime.driver
        self.buffers, self.events, self.held = {}, {}, []
        for rank, c in group.communicators.items():
            device = group.devices[rank]
            stream = driver.new_stream(c.ordinal)
            x = jax.device_put(inputs[rank], device)
            shape, dtype = outputs[rank]
            y = jnp.full(shape, 1, dtype, device=device)
            self.held += x, group.runtime.lend(x, stream), group.runtime.lend(y, stream)
            self.buffers[rank] = x, y, stream
        errors = []

        def run(rank, c):
            x, y, stream = self.buffers[rank]
            try:
                call(c, x.unsafe_buffer_pointer(), y.unsafe_buffer_pointer(), stream)
            except Exception as error:
                errors.append(error)

        threads = [
            threading.Thread(target=run, args=item, daemon=True)
            for item in group.communicators.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "enqueuing a call hangs"
        if errors:
            raise errors[0]
        for rank, c in group.communicators.items():
            self.events[rank] = driver.record(c.ordinal, self.buffers[rank][2])

    def results(self, limit=30.0):
        """rank -> numpy array; raises the group's error, or AssertionError after `limit` s."""
        deadline = time.monotonic() + limit
        while not all(event.done() for event in self.events.values()):
            self.group.check()
            assert time.monotonic() < deadline, "a collective hangs"
            time.sleep(0.001)
        self.group.check()
        adopt = self.group.runtime.adopt
        return {
            rank: np.asarray(adopt(y, self.events[rank]))
            for rank, (_, y, _) in self.buffers.items()
        }


def gather(group, count=4, dtype="float32", limit=30.0):
    """All-gathers `count` elements of value `rank` from every rank; checks and returns nothing."""
    n = len(group.devices)
    inputs = {r: np.full(count, r).astype(jnp.dtype(dtype)) for r in group.communicators}
    outputs = dict.fromkeys(group.communicators, ((n, count), dtype))
    work = UnderWay(
        group, inputs, outputs, lambda c, x, y, stream: c.all_gather(x, y, count, dtype, stream)
    )
    for result in work.results(limit).values():
        expected = np.repeat(np.arange(n), count).reshape(n, count)
        np.testing.assert_array_equal(result.astype(np.float32), expected)


def gather_in_jit(group, text, repeat=1, function=None):
    """A jitted chain of `repeat` all-gathers over `group`, each followed by an add of its mean."""
    n = len(group.devices)
    mesh = jax.sharding.Mesh(np.array(group.devices), ("x",))
    at = {c.ordinal: c for c in group.communicators.values()}

    def chain(x):
        def gather(stream, ordinal, inputs, outputs):
            at[ordinal].all_gather(inputs[0], outputs[0], x.size, "float32", stream)

        shape = jax.ShapeDtypeStruct((n, *x.shape), x.dtype)
        for _ in range(repeat):
            x = x + ffi.call(f"{text} {x.size}", function or gather, shape, x).mean(0)
        return x

    mapped = jax.shard_map(chain, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    return jax.jit(mapped), jax.NamedSharding(mesh, P("x"))


def expected_chain(x, n, repeat):
    """What the chain gives, in numpy."""
    parts = x.reshape(n, -1)
    for _ in range(repeat):
        parts = parts + parts.mean(0)
    return parts.reshape(-1)
