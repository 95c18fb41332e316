"""Entry barriers between back-to-back calls, in every interleaving.

Interpret mode keeps successive kernels apart by barriers of its own, so what happens between two
calls is explored here on a model of the barrier's rules: signals arrive in any order and at any
time, a device enters its next call as soon as its kernel lets it. Unsafe is a device that passes
the barrier of call k while one that it is about to write to has not entered call k.
"""

from collections.abc import Callable

import pytest

Peers = Callable[[int, int], list[int]]


def neighbours(device: int, n: int) -> list[int]:
    return [(device + 1) % n, (device - 1) % n]


def on_torus(device: int, n: int) -> list[int]:
    """Both neighbours on each axis of 2 x n/2 devices."""
    x, y = divmod(device, n // 2)
    along_y = [x * (n // 2) + (y + step) % (n // 2) for step in (1, -1)]
    return [(1 - x) * (n // 2) + y] * 2 + along_y


def everyone(device: int, n: int) -> list[int]:
    return [(device + offset) % n for offset in range(1, n)]


def first_unsafe_pass(n: int, calls: int, peers: Peers, needs_all: bool) -> str | None:
    """Explores all states; describes a pass of a barrier that is unsafe, or None.

    State: per device (call, whether its barrier is passed), its semaphore's count; signals in
    flight towards each device. A kernel that `needs_all` ends when all have passed its barrier.
    """
    # Before call 0 there is a call -1 that everyone has finished.
    start = (tuple((-1, True) for _ in range(n)), (0,) * n, (0,) * n)
    seen, todo = {start}, [start]
    while todo:
        devices, counts, flying = todo.pop()
        following = []
        for d, (call, passed) in enumerate(devices):
            if flying[d]:  # a signal arrives
                following.append((devices, _add(counts, d, 1), _add(flying, d, -1)))
            if not passed and counts[d] >= len(peers(d, n)):  # the wait ends
                late = [p for p in peers(d, n) if devices[p][0] < call]
                if late:
                    return f"device {d} passes call {call} before {late} have entered it"
                step = (*devices[:d], (call, True), *devices[d + 1 :])
                following.append((step, _add(counts, d, -len(peers(d, n))), flying))
            all_passed = all(c > call or (c == call and p) for c, p in devices)
            if passed and call + 1 < calls and (all_passed or not needs_all or call < 0):
                step = (*devices[:d], (call + 1, False), *devices[d + 1 :])
                more = flying
                for peer in peers(d, n):
                    more = _add(more, peer, 1)
                following.append((step, counts, more))
        for state in following:
            if state not in seen:
                seen.add(state)
                todo.append(state)
    return None


def _add(counts: tuple[int, ...], index: int, amount: int) -> tuple[int, ...]:
    return (*counts[:index], counts[index] + amount, *counts[index + 1 :])


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_neighbours_suffice_where_a_kernel_needs_blocks_from_all(n: int) -> None:
    assert first_unsafe_pass(n, 3, neighbours, needs_all=True) is None


def test_neighbours_on_a_torus_suffice_where_a_kernel_needs_blocks_from_all() -> None:
    assert first_unsafe_pass(4, 3, on_torus, needs_all=True) is None


@pytest.mark.parametrize("n", [2, 3, 4])
def test_everyone_suffices_for_any_kernel(n: int) -> None:
    assert first_unsafe_pass(n, 3, everyone, needs_all=False) is None


def test_neighbours_do_not_suffice_for_a_kernel_that_may_end_early() -> None:
    assert first_unsafe_pass(4, 3, neighbours, needs_all=False) is not None
    assert first_unsafe_pass(4, 2, on_torus, needs_all=False) is not None
