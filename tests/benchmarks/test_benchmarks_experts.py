"""`python -m benchmarks experts`: its routings, its bounds, and what it prints."""

import numpy as np
import pytest

import benchmarking
import harness
from benchmarks import experts, experts_gpu
from pallas_collectives.kernels import ragged_all_to_all
from pallas_collectives.replay import Machine, bound

E, K = 16, 2


@pytest.mark.parametrize("name", experts.ROUTINGS)
def test_visits_count_each_token_once_a_device(name: str) -> None:
    n, tokens = 4, 32
    sent = experts.visits(name, n, tokens, E, K)
    rng = np.random.default_rng(0)
    for home in range(n):
        chosen = experts.ROUTINGS[name](rng, tokens, E, K)
        assert all(len(set(row)) == K for row in chosen)
        want = [sum(any(e // (E // n) == away for e in row) for row in chosen) for away in range(n)]
        assert [*sent[home]] == want


def test_the_bound_is_that_of_the_very_routing() -> None:
    """All to device 0 of a ring of 16: two links lead there, and carry 15 devices' tokens."""
    machine, tokens, nbytes = Machine.named("v6e:16"), 100, 2 * 7168
    sent = np.zeros((16, 16))
    sent[:, 0] = tokens
    least = bound("ragged_all_to_all", machine, np.arange(16)[None], nbytes * sent)
    link = machine.generation.link_bandwidth * machine.generation.link_efficiency
    assert np.isclose(least.wire, 15 * tokens * nbytes / (2 * link))


@pytest.mark.full
@pytest.mark.parametrize(
    "name, pod",
    [*[("balanced", pod) for pod in ("v6e:4x4", "v5p:4x4", "v6e:16")], ("worst", "v6e:4x4")],
)
def test_rows_of_a_prefill_are_near_the_wires_bound(name: str, pod: str) -> None:
    machine = Machine.named(pod)
    sent = experts.visits(name, 16, 1024, 256, 8)
    for matrix in (sent, np.ascontiguousarray(sent.T)):
        report = experts.replayed(machine, matrix, 7168, races=False, algorithm="auto")
        least = bound("ragged_all_to_all", machine, np.arange(16)[None], 2.0 * 7168 * matrix)
        assert not report.findings
        assert least.wire / report.time >= 0.85


def test_moments_taken_as_one_lengthen_times_by_little() -> None:
    machine, sent = Machine.named("v6e:4x4"), experts.visits("zipf", 16, 256, 256, 8)
    exact, rough = (
        experts.replayed(machine, sent, 7168, races=False, algorithm="direct", grain=grain).time
        for grain in (0.0, 1e-6)
    )
    assert exact <= rough <= 1.01 * exact


def test_small_kernels_take_no_longer_for_moments_of_a_large_one() -> None:
    machine, sent = Machine.named("v6e:4x4"), np.ones((16, 16), np.int32)
    exact, rough = (
        experts.replayed(machine, sent, 128, races=False, algorithm="spread", grain=grain).time
        for grain in (0.0, 1e-4)
    )
    assert exact <= rough <= 1.1 * exact


@pytest.mark.full
def test_a_ring_is_busy_all_the_time_under_a_skewed_routing() -> None:
    """Rounds overlap: one by one they take 67% of the bound's rate, and 81% where rows are many."""
    machine, sent = Machine.named("v5e:16"), experts.visits("zipf", 16, 128, 256, 8)
    back = np.ascontiguousarray(sent.T)
    report = experts.replayed(machine, back, 7168, races=False, algorithm="ring")
    least = bound("ragged_all_to_all", machine, np.arange(16)[None], 2.0 * 7168 * back)
    assert not report.findings
    assert least.wire / report.time >= 0.78  # 0.91 of 4096 tokens


@pytest.mark.full
@pytest.mark.parametrize("pod, algorithm", [("v6e:4x4", "direct"), ("v5e:16", "ring")])
def test_the_exchange_on_16_devices_has_no_race(
    pod: str, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CHUNK_BYTES", "LEAST_CHUNK_BYTES", "LEAST_PIECE_BYTES"):
        monkeypatch.setattr(ragged_all_to_all, name, 2 * 2 * 256)
    sent = experts.visits("zipf", 16, 16, 256, 8)
    report = experts.replayed(Machine.named(pod), sent, 256, races=True, algorithm=algorithm)
    assert not report.findings


@pytest.mark.full
def test_what_is_timed_on_gpus_gives_back_the_tokens() -> None:
    problem = experts_gpu.Problem(tokens=8, width=4, experts=E, choices=K)
    routing = np.array([experts.balanced(np.random.default_rng(d), 8, E, K) for d in range(2)])
    x = np.random.default_rng(0).standard_normal((2, 8, 4)).astype(np.float32)
    calls = problem.calls()
    assert next(iter(calls)) == "dense all-to-alls" and len(calls) == 7
    by_lax = {name: call for name, call in calls.items() if name.startswith("lax")}
    assert len(by_lax) == 3
    for name, call in by_lax.items():  # it runs on CPUs
        home = harness.per_device(call, harness.mesh(2))(x, routing)
        np.testing.assert_allclose(home, x, rtol=1e-6, err_msg=name)
    (times,) = [
        experts_gpu.microseconds(problem, call, routing, harness.mesh(2), iters=10)
        for name, call in calls.items()
        if name == "lax, dense"
    ]
    assert len(times) == 9


def test_what_it_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = benchmarking.in_process(monkeypatch, capsys)
    few = ("--tokens=16", "--width=256", "--experts=16", "--choices=2")
    done = bench("experts", *few, "--expert_pods=v6e:4", "--routings=balanced")
    header, *lines = done.out.splitlines()[2:]
    assert done.status == 0 and header.split()[:3] == ["pod", "routing", "tokens"]
    assert [line.split()[3:5] for line in lines] == [["there", "visits"], ["back", "visits"]]
    assert all(line.endswith("ok") for line in lines)
    for wrong, said in [
        ("--tokens=0", "whole number"),
        ("--routings=even", "the routings are"),
        ("--expert_pods=v6e", "write it like v5e:16"),
        ("--experts=10", "a multiple of the 4 devices"),
        ("--width=200", "a multiple of 128"),  # the kernels would be modelled 128 wide
    ]:
        done = bench("experts", *few, "--expert_pods=v6e:4", wrong)
        assert done.status == 2 and said in done.err


def test_on_gpus_all_named_tokens_are_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[tuple[int, ...]] = []
    monkeypatch.setattr(experts_gpu, "run", lambda problem, chosen: ran.append(chosen.shape))
    monkeypatch.setattr(experts.devices, "kind", lambda: "gpu")
    bench = benchmarking.in_process(monkeypatch, capsys)
    done = bench("experts", "--tokens=16,8", "--experts=16", "--choices=2", "--iters=7")
    assert done.status == 0, done.err
    assert ran == [(8, 16, 2), (8, 8, 2)]
