"""Routings of tokens to experts, good and bad, and what must come of them, by numpy and one-hot."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

EXPERTS = 16
# Who moves the tokens of a call, and by which exchange.
HOW: dict[str, dict[str, Any]] = {
    "dense": {"backend": "xla", "exchange": "dense"},
    "ragged": {"backend": "xla", "exchange": "ragged"},
    "kernels": {"backend": "pallas", "exchange": "slots"},
    "ragged kernels": {"backend": "pallas", "exchange": "ragged"},
}


def random(n: int, tokens: int, k: int, experts: int = EXPERTS, seed: int = 0) -> np.ndarray:
    """int32[n, tokens, k]: any expert, some twice by one token, some -1."""
    return np.random.default_rng(seed).integers(-1, experts, (n, tokens, k)).astype(np.int32)


def skewed(n: int, tokens: int, k: int, experts: int = EXPERTS) -> dict[str, np.ndarray]:
    """Routings by name: those that find what is wrong."""
    shape, rng = (n, tokens, k), np.random.default_rng(1)
    one_token = np.full(shape, -1)
    one_token[n - 1, 0, 0] = experts - 1
    of_device_0 = rng.integers(0, max(1, experts // n), shape)
    of_device_0[0] = -1
    return {
        name: np.asarray(chosen, np.int32)
        for name, chosen in {
            "random": random(n, tokens, k, experts),
            "all to one expert": np.full(shape, experts // 2),
            "all to one device, none from it": of_device_0,
            "one token": one_token,
            "nothing": np.full(shape, -1),
            "neighbours": np.arange(n)[:, None, None] * (experts // n) + np.zeros(shape),
        }.items()
    }


@dataclasses.dataclass
class Expected:
    """What dispatch gives, of all devices.

    Attributes:
      rows: (n, R, D).
      group_sizes: (n, experts of a device).
      kept: bool(n, T, k).
      overflow: (n,).
    """

    rows: np.ndarray
    group_sizes: np.ndarray
    kept: np.ndarray
    overflow: np.ndarray


def expected(x: np.ndarray, experts: np.ndarray, rows: int, total: int = EXPERTS) -> Expected:
    """By loops: each device takes what comes, by home, token and expert, while it has room."""
    (n, tokens, _), each = experts.shape, total // len(x)
    taken: list[list[tuple[int, int, int]]] = [[] for _ in range(n)]
    kept = np.zeros(experts.shape, bool)
    for home in range(n):
        for token in range(tokens):
            chosen = experts[home, token]
            for expert in sorted({int(e) for e in chosen if 0 <= e < total}):
                away = taken[expert // each]
                if len(away) < rows:
                    away.append((expert % each, home, token))
                    kept[home, token, chosen == expert] = True
    result = np.zeros((n, rows, x.shape[-1]), x.dtype)
    for device, away in enumerate(taken):
        for row, (_, home, token) in enumerate(sorted(away)):
            result[device, row] = x[home, token]
    group_sizes = [np.bincount([e for e, *_ in away], minlength=each) for away in taken]
    valid = (experts >= 0) & (experts < total)
    return Expected(result, np.array(group_sizes), kept, (valid & ~kept).sum((1, 2)))


def weighed(weights: Any, experts: np.ndarray, kept: np.ndarray, overflow: str) -> Any:
    """The weights that count, after some choices were turned away."""
    valid = (experts >= 0) & (experts < EXPERTS)
    left = jnp.where(kept, weights, 0)
    if overflow == "drop":
        return left
    cut = (valid & ~kept).any(-1, keepdims=True) & kept.any(-1, keepdims=True)
    wanted = jnp.where(valid, weights, 0).sum(-1, keepdims=True)
    return jnp.where(cut, left * wanted / jnp.where(cut, left.sum(-1, keepdims=True), 1), left)


def answers(x: Any, experts: Any, weights: Any, w: Any) -> jax.Array:
    """What tokens get, densely: x (n, T, D), weights (n, T, k), w (E, D, H) -> (n, T, H)."""
    hot = jax.nn.one_hot(experts, len(w), dtype=jnp.float32)
    of_all = jnp.tanh(jnp.einsum("ntd,edh->nteh", x, w, precision="highest"))
    return jnp.einsum("ntke,ntk,nteh->nth", hot, weights, of_all, precision="highest")
