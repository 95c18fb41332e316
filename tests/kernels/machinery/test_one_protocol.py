"""Devices wait for each other in `machinery` alone: kernels write no credit and no barrier."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import pallas_collectives

ROOT = Path(pallas_collectives.__file__).parent
# What adds to a semaphore of another device without a copy, or waits for that: of Pallas, and ours.
OF_PALLAS = {"semaphore_signal", "semaphore_wait", "semaphore_read", "get_barrier_semaphore"}
OF_SYNC = {"signal", "signal_all", "barrier_with"}
WHERE = {
    "kernels/machinery/channel.py",  # credits
    "kernels/machinery/sync.py",  # the entry barriers
    "kernels/machinery/entry.py",  # which of them is run, and who may leave when
}


def used(text: str) -> Iterator[str]:
    """The names of these that a module uses, called or not, in whatever way it comes by them."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Attribute(value=of, attr=name):
                if name in OF_PALLAS or (name in OF_SYNC and ast.unparse(of).endswith("sync")):
                    yield name
            case ast.ImportFrom(module=module, names=names):
                ours = OF_SYNC if (module or "").endswith("sync") else set()
                yield from (each.name for each in names if each.name in OF_PALLAS | ours)


def test_credits_and_barriers_stand_in_machinery_alone() -> None:
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in ROOT.rglob("*.py")}
    assert len(texts) > 100
    assert {name for name, text in texts.items() if any(used(text))} == WHERE


@pytest.mark.parametrize(
    "text",
    [
        "pl.semaphore_wait(credit, 1)",
        "only_if(again, functools.partial(pl.semaphore_signal, credit, 1, device_id=peer))",
        "sync.signal(ring, credit, peer)",
        "machinery.sync.signal_all(ring, peers_ref, credit)",
        "from pallas_collectives.kernels.machinery.sync import signal as told",
        "from jax.experimental.pallas import semaphore_wait",
    ],
)
def test_a_credit_is_found_however_it_is_written(text: str) -> None:
    assert list(used(text))


@pytest.mark.parametrize("text", ["sync.wait(sem, ref)", "channel.release(k)", "'semaphore_wait'"])
def test_what_is_no_credit_is_not(text: str) -> None:
    assert not list(used(text))
