"""Collectives in two halves between processes: by mailboxes on each GPU, here on a host's wire."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harness
import nccl_host
import pallas_collectives as pc
from in_halves import SHIFT, N, on_devices
from pallas_collectives.backends import flights
from pallas_collectives.nccl import mailboxes, posts


def by_posts(monkeypatch, reached=True):
    """Has the host's devices exchange by mailboxes, as if each were another process's."""
    nccl_host.serve(monkeypatch)
    monkeypatch.setattr(flights, "_in_one_process", lambda group: False)
    if not reached:

        def refused(*args, **options):
            raise mailboxes.MailboxError("GPU 1 cannot reach its peers' memory")

        monkeypatch.setattr(mailboxes, "get", refused)


@pytest.mark.parametrize("reached", [True, False])
def test_gpus_of_several_processes_exchange_by_mailboxes(reached, monkeypatch, caplog):
    """Or at once, where they cannot reach each other's memory; gradients and loops too."""
    by_posts(monkeypatch, reached)
    x = harness.random((N, 4, 6), "float32")

    def program(x, start=True):
        def turn(carry, block):
            if start:
                started = pc.all_gather_start(block, "x", tiled=True, after=carry)
                come = started.done(after=carry)
                moved = pc.ppermute_start(come, "x", SHIFT[:2]).done()
                sent = pc.all_to_all_start(moved, "x", 0, 0, tiled=True).done()
            else:
                come = jax.lax.all_gather(block, "x", tiled=True)
                moved = jax.lax.ppermute(come, "x", SHIFT[:2])
                sent = jax.lax.all_to_all(moved, "x", 0, 0, tiled=True)
            return jnp.tanh(carry + come.sum() + moved.sum()), sent

        return jax.lax.scan(turn, x[0], x)[1]

    def slope(x, start):
        return jax.grad(lambda x: jnp.sum(jnp.sin(program(x, start))))(x)

    for fn in (program, slope):
        got, want = (on_devices(functools.partial(fn, start=s), x) for s in (True, False))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    told = any("cannot reach its peers' memory" in message for message in caplog.messages)
    assert told is not reached


def test_a_mailbox_has_one_exchange_under_way(monkeypatch):
    """Whoever finishes one that another has followed is told, and one left alone harms nothing."""
    by_posts(monkeypatch)
    monkeypatch.setattr(posts, "_MOST", 1)
    monkeypatch.setattr(posts, "_LEAST", 1)
    x = harness.random((N, 2, 1024), "float32")

    def program(x, finish):
        first = pc.all_gather_start(x[0], "x", tiled=True)
        second = pc.all_gather_start(x[1], "x", tiled=True, after=first.before(x[0], surely=True))
        y = second.done()
        return y + first.done(after=y) if finish else y

    want = on_devices(lambda x: jax.lax.all_gather(x[1], "x", tiled=True), x)
    np.testing.assert_array_equal(on_devices(functools.partial(program, finish=False), x), want)
    with pytest.raises(Exception, match="another has followed it in its mailbox"):
        on_devices(functools.partial(program, finish=True), x)
