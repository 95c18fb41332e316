"""Small transformers written with `jax.lax`'s collectives, in the ways that large ones are trained.

Nothing here knows of `pallas_collectives`: the test runs each model as it is and under
`override_lax`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

TEXT = (
    "A ring of chips sat down to play a game of passing bits all day. "
    "Each took the word its left had said and passed it to the right instead. "
)
ALPHABET = sorted(set(TEXT))
WIDTH, HEADS, HIDDEN, LENGTH, BATCH, LAYERS = 16, 4, 32, 8, 8, 2
RATE = 0.5

Params = dict[str, Any]


def batch() -> np.ndarray:
    """(BATCH, LENGTH + 1) windows of the text, as positions in `ALPHABET`."""
    text = np.array([ALPHABET.index(letter) for letter in TEXT], np.int32)
    starts = np.arange(BATCH) * (len(text) - LENGTH - 1) // BATCH
    return np.stack([text[start : start + LENGTH + 1] for start in starts])


def weights(experts: int = 0, layers: int = LAYERS) -> Params:
    """Weights from fixed seeds; layers are stacked in front, for a scan."""
    rng = np.random.default_rng(0)

    def matrix(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[-2])).astype(np.float32)

    stacked = {
        "qkv": matrix(layers, WIDTH, 3 * WIDTH),
        "project": matrix(layers, WIDTH, WIDTH),
        "up": matrix(layers, WIDTH, HIDDEN),
        "down": matrix(layers, HIDDEN, WIDTH),
    }
    if experts:
        stacked["up"] = matrix(layers, experts, WIDTH, HIDDEN)
        stacked["down"] = matrix(layers, experts, HIDDEN, WIDTH)
        stacked["route"] = matrix(layers, WIDTH, experts)
    vocabulary = -(-len(ALPHABET) // 8) * 8  # whole rows for each device
    return {"embed": matrix(vocabulary, WIDTH), "layers": stacked}


def _norm(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def _attend(qkv: jax.Array, heads: int) -> jax.Array:
    """Causal attention; (batch, length, 3 * heads * size) -> (batch, length, heads * size)."""
    q, k, v = jnp.moveaxis(qkv.reshape(*qkv.shape[:2], 3, heads, -1), 2, 0)
    scores = jnp.einsum("bqhe,bkhe->bhqk", q, k) / np.sqrt(q.shape[-1])
    visible = np.tril(np.ones((q.shape[1], q.shape[1]), bool))
    shares = jax.nn.softmax(jnp.where(visible, scores, -1e30))
    return jnp.einsum("bhqk,bkhe->bqhe", shares, v).reshape(*qkv.shape[:2], -1)


def losses(x: jax.Array, embed: jax.Array, targets: jax.Array) -> jax.Array:
    """Every position's cross-entropy."""
    scores = jax.nn.log_softmax(_norm(x) @ embed.T)
    return -jnp.take_along_axis(scores, targets[..., None], -1)[..., 0]


def dense_layer(x: jax.Array, w: Params) -> jax.Array:
    x = x + _attend(_norm(x) @ w["qkv"], HEADS) @ w["project"]
    return x + jax.nn.gelu(_norm(x) @ w["up"]) @ w["down"]


@dataclasses.dataclass(frozen=True)
class Model:
    """A way to train.

    Attributes:
      mesh: the devices.
      specs: how each weight is sharded.
      data: how the batch is sharded.
      loss: (this device's weights, its part of the batch) -> the mean loss, equal on all devices.
    """

    mesh: Mesh
    specs: Params
    data: P
    loss: Callable[[Params, jax.Array], jax.Array]

    def place(self, w: Params) -> Params:
        """The weights on the devices, as `step` leaves them."""
        shardings = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.specs)
        return jax.device_put(w, shardings)

    def step(self) -> Callable[[Params, jax.Array], tuple[jax.Array, Params, Params]]:
        """(weights, batch) -> loss, gradients, new weights."""

        def shard(w: Params, tokens: jax.Array) -> tuple[jax.Array, Params, Params]:
            loss, gradients = jax.value_and_grad(self.loss)(w, tokens)
            return loss, gradients, jax.tree.map(lambda w, g: w - RATE * g, w, gradients)

        out_specs = (P(), self.specs, self.specs)
        in_specs = (self.specs, self.data)
        return jax.jit(jax.shard_map(shard, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs))


def flattened(w: Params) -> Params:
    """Each layer's weights in one vector, for one gather."""
    return {**w, "layers": jax.vmap(lambda layer: ravel_pytree(layer)[0])(w["layers"])}


def fsdp(devices: np.ndarray) -> Model:
    """Weights cut in pieces, one a device, and gathered layer by layer while they are used.

    What gathers weights forward scatters their gradient backward; `jax.checkpoint` gathers again.
    """
    whole_layer = jax.tree.map(lambda w: w[0], weights()["layers"])
    _, unflatten = ravel_pytree(whole_layer)

    def gathered(w: jax.Array) -> jax.Array:
        return lax.all_gather(w, "x", tiled=True)

    @jax.checkpoint
    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return dense_layer(x, unflatten(gathered(w))), None

    def loss(w: Params, tokens: jax.Array) -> jax.Array:
        embed = gathered(w["embed"])
        x, _ = lax.scan(layer, embed[tokens[:, :-1]], w["layers"])
        return lax.pmean(jnp.mean(losses(x, embed, tokens[:, 1:])), "x")

    specs = {"embed": P("x"), "layers": P(None, "x")}
    return Model(Mesh(devices, ("x",)), specs, P("x"), loss)


def tensor_parallel(devices: np.ndarray) -> Model:
    """Heads and hidden units divided over axis "model", and the sequence too between them.

    Between the matrices a device holds a part of the sequence, and gathers it to multiply; what it
    multiplied is a term of a sum, which is scattered over the sequence. Batches are divided over
    "data". `embed` is whole everywhere, and its gradient a sum that differentiation adds.
    """

    def gathered(x: jax.Array) -> jax.Array:
        return lax.all_gather(x, "model", axis=1, tiled=True)

    def scattered(x: jax.Array) -> jax.Array:
        return lax.psum_scatter(x, "model", scatter_dimension=1, tiled=True)

    def layer(x: jax.Array, w: Params) -> tuple[jax.Array, None]:
        qkv = gathered(_norm(x)) @ w["qkv"].reshape(WIDTH, -1)
        x = x + scattered(_attend(qkv, HEADS // lax.axis_size("model")) @ w["project"])
        return x + scattered(jax.nn.gelu(gathered(_norm(x)) @ w["up"]) @ w["down"]), None

    def loss(w: Params, tokens: jax.Array) -> jax.Array:
        part = LENGTH // lax.axis_size("model")
        start = lax.axis_index("model") * part
        tokens = lax.dynamic_slice_in_dim(
            lax.pcast(tokens, "model", to="varying"), start, part + 1, axis=1
        )
        x, _ = lax.scan(layer, w["embed"][tokens[:, :-1]], w["layers"])
        return lax.pmean(jnp.mean(losses(x, w["embed"], tokens[:, 1:])), ("data", "model"))

    layers = {
        "qkv": P(None, None, None, "model"),
        "project": P(None, "model"),
        "up": P(None, None, "model"),
        "down": P(None, "model"),
    }
    mesh = Mesh(devices.reshape(2, 4), ("data", "model"))
    return Model(mesh, {"embed": P(), "layers": layers}, P("data"), loss)


def by_thirds(w: Params) -> Params:
    """`qkv` with a dimension for its three parts, so that heads can be divided over devices."""
    qkv = w["layers"]["qkv"].reshape(-1, WIDTH, 3, WIDTH)
    return {**w, "layers": {**w["layers"], "qkv": qkv}}


def experts(devices: np.ndarray) -> Model:
    """A mixture of experts, one per device; each token is sent to the one that it chooses."""

    def layer(x: jax.Array, w: Params) -> tuple[jax.Array, None]:
        x = x + _attend(_norm(x) @ w["qkv"], HEADS) @ w["project"]
        tokens = _norm(x).reshape(-1, WIDTH)
        chosen, share = _route(tokens, w["route"])
        mixed = _expert_parallel(tokens, chosen, w["up"][0], w["down"][0]) * share[:, None]
        return x + mixed.reshape(x.shape), None

    return _of_experts(devices, layer)


def _of_experts(devices: np.ndarray, layer: Callable[..., tuple[jax.Array, None]]) -> Model:
    """A scan of layers, in which each device has its experts and its share of the batch."""

    def loss(w: Params, tokens: jax.Array) -> jax.Array:
        x, _ = lax.scan(layer, w["embed"][tokens[:, :-1]], w["layers"])
        return lax.pmean(jnp.mean(losses(x, w["embed"], tokens[:, 1:])), "x")

    layers = {
        **dict.fromkeys(("qkv", "project", "route"), P()),
        **dict.fromkeys(("up", "down"), P(None, "x")),
    }
    return Model(Mesh(devices, ("x",)), {"embed": P(), "layers": layers}, P("x"), loss)


def _route(tokens: jax.Array, route: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The expert that each token chooses, and what it makes of its answer."""
    shares = jax.nn.softmax(tokens @ route)
    return jnp.argmax(shares, -1), jnp.max(shares, -1)


def _expert_parallel(
    tokens: jax.Array, chosen: jax.Array, up: jax.Array, down: jax.Array
) -> jax.Array:
    """Each token's answer from the expert it chose: there and back by ragged_all_to_all."""
    n, me = lax.axis_size("x"), lax.axis_index("x")
    order = jnp.argsort(chosen)
    sent = jnp.bincount(chosen, length=n).astype(jnp.int32)
    everyones = lax.all_gather(sent, "x")  # row s: how many s sends to each
    received = everyones[:, me]
    # Where tokens begin: on their sender, by expert; with their expert, by sender.
    at_home = jnp.cumsum(everyones, 1) - everyones
    away = jnp.cumsum(everyones, 0) - everyones

    room = lax.pcast(jnp.zeros((n * len(tokens), WIDTH)), "x", to="varying")
    visiting = lax.ragged_all_to_all(
        tokens[order], room, at_home[me], sent, away[me], received, axis_name="x"
    )
    answers = jax.nn.gelu(visiting @ up) @ down
    home = lax.ragged_all_to_all(
        answers, tokens * 0, away[:, me], received, at_home[:, me], sent, axis_name="x"
    )
    return home[jnp.argsort(order)]


def dense_experts_step(w: Params, tokens: jax.Array) -> tuple[jax.Array, Params, Params]:
    """`experts` without devices: every expert answers every token, and the chosen one is heard."""

    def layer(x: jax.Array, w: Params) -> tuple[jax.Array, None]:
        x = x + _attend(_norm(x) @ w["qkv"], HEADS) @ w["project"]
        tokens = _norm(x).reshape(-1, WIDTH)
        chosen, share = _route(tokens, w["route"])
        hidden = jax.nn.gelu(jnp.einsum("td,edh->teh", tokens, w["up"]))
        answers = jnp.einsum("teh,ehd->ted", hidden, w["down"])
        heard = jnp.take_along_axis(answers, chosen[:, None, None], 1)[:, 0]
        return x + (heard * share[:, None]).reshape(x.shape), None

    def loss(w: Params) -> jax.Array:
        x, _ = lax.scan(layer, w["embed"][tokens[:, :-1]], w["layers"])
        return jnp.mean(losses(x, w["embed"], tokens[:, 1:]))

    value, gradients = jax.value_and_grad(loss)(w)
    return value, gradients, jax.tree.map(lambda w, g: w - RATE * g, w, gradients)


Mix = Callable[..., jax.Array]  # (tokens, chosen experts, their shares, up, down) -> tokens


def routed(devices: np.ndarray, mix: Mix, choices: int = 2) -> Model:
    """Expert parallelism with several choices a token, by `mix`; rematerialised, and scanned."""

    @jax.checkpoint
    def layer(x: jax.Array, w: Params) -> tuple[jax.Array, None]:
        x = x + _attend(_norm(x) @ w["qkv"], HEADS) @ w["project"]
        tokens = _norm(x).reshape(-1, WIDTH)
        shares, chosen = lax.top_k(jax.nn.softmax(tokens @ w["route"]), choices)
        mixed = mix(tokens, chosen, shares, w["up"], w["down"])
        return x + mixed.reshape(x.shape), None

    return _of_experts(devices, layer)


def mix_by_lax(
    tokens: jax.Array, chosen: jax.Array, shares: jax.Array, up: jax.Array, down: jax.Array
) -> jax.Array:
    """Everyone's tokens to all devices; each has its experts answer all, weighs, and scatters."""
    first = lax.axis_index("x") * len(up)
    everyones = lax.all_gather(tokens, "x", tiled=True)
    chosen, shares = (lax.all_gather(a, "x", tiled=True) for a in (chosen, shares))
    own = jax.nn.one_hot(chosen - first, len(up))  # zeros for the experts of others
    weights = jnp.einsum("tke,tk->te", own, shares)
    hidden = jax.nn.gelu(jnp.einsum("td,edh->teh", everyones, up))
    heard = jnp.einsum("teh,ehd,te->td", hidden, down, weights)
    return lax.psum_scatter(heard, "x", tiled=True)
