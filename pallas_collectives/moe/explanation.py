"""`explain`: what each exchange of tokens sends, and which is chosen."""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_collectives.backends.plans import How
from pallas_collectives.errors import CollectiveError
from pallas_collectives.moe import exchanges
from pallas_collectives.topology import chips


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a device sends to others to have its tokens at their experts, or back; printable.

    Attributes:
      visits: to how many other devices a token goes, on average.
      ragged_bytes: bytes of tokens and words on choices, where only what is wanted is sent.
      slots_bytes: bytes of tokens that are wanted, and of all choices.
      dense_bytes: where everyone gets all tokens.
      ragged_rows: what a device has to have room for, visitors on average.
      dense_rows: the same; also by slots.
      chip: the TPU generation for which an exchange is chosen.
      chosen: "ragged", "slots" or "dense": what "auto" is there; on GPUs it is dense.
    """

    visits: float
    ragged_bytes: float
    slots_bytes: float
    dense_bytes: float
    ragged_rows: float
    dense_rows: float
    chip: str
    chosen: str

    @property
    def ratio(self) -> float:
        """Bytes of the dense exchange, to those of the ragged one."""
        return self.dense_bytes / self.ragged_bytes if self.ragged_bytes else 1.0

    def __str__(self) -> str:
        mib = 1 << 20
        return "\n".join(
            (
                f"a token goes to {self.visits:.2f} other devices",
                f"  ragged  {self.ragged_bytes / mib:10.2f} MiB sent, {self.ragged_rows:10.0f}"
                " visitors; counts first; NCCL's host waits, and no CUDA graph",
                f"  slots   {self.slots_bytes / mib:10.2f} MiB sent, {self.dense_rows:10.0f}"
                " visitors; all choices with them, no counts; on TPUs; or by a gather",
                f"  dense   {self.dense_bytes / mib:10.2f} MiB sent, {self.dense_rows:10.0f}"
                " visitors; static, so CUDA graphs take it",
                f"  dense sends {self.ratio:.2f} times as much",
                f"  on {self.chip}, along one axis, {self.chosen} is chosen",
            )
        )


def explain(
    *,
    tokens: int,
    width: int,
    k: int,
    num_experts: int,
    devices: int,
    dtype: DTypeLike = jnp.bfloat16,
    chip: str = "v5p",
) -> Explanation:
    """What a dispatch sends from each device, and a combine back, by each exchange.

    For tokens that choose k different experts, all as likely.

    Args:
      tokens: T, of each device.
      width: D, elements of a token.
      k: choices of each.
      num_experts: E, a multiple of `devices`.
      devices: n.
      dtype: the dtype of the tokens.
      chip: a TPU generation: "v4", "v5e", "v5p", "v6e" or "7x".

    Raises:
      CollectiveError: numbers that do not fit together, or an unknown chip.

    Example:
      >>> said = pc.moe.explain(tokens=4096, width=4096, k=2, num_experts=16, devices=2)
      >>> f"dense sends {said.ratio:.2f} times as much"
      'dense sends 1.30 times as much'
    """
    if min(tokens, width, k, num_experts, devices) < 1 or num_experts % devices or k > num_experts:
        raise CollectiveError(
            f"tokens={tokens}, width={width}, k={k}, num_experts={num_experts}, devices={devices}",
            "all are 1 or more, k is at most num_experts, and devices divides num_experts",
            "name sizes such as tokens=4096, width=4096, k=2, num_experts=16, devices=2",
        )
    if chip not in chips.BY_NAME:
        known = ", ".join(chips.BY_NAME)
        raise CollectiveError(f"chip={chip!r}", f"it must be one of {known}", "name one of them")
    chosen = exchanges.choose(
        "auto",
        How("pallas"),
        (devices,),
        tokens=tokens,
        experts=num_experts,
        k=k,
        rows=None,
        reaches_all=chips.BY_NAME[chip].reaches_all,
    )
    visits = exchanges.visits(devices, num_experts, k)
    each = visits / (devices - 1) if devices > 1 else 1.0
    row, remote = width * jnp.dtype(dtype).itemsize, (devices - 1) / devices
    words = 4 * tokens * k
    return Explanation(
        visits=visits,
        ragged_bytes=visits * tokens * row + remote * words,
        slots_bytes=visits * tokens * row + (devices - 1) * words,
        dense_bytes=(devices - 1) * (tokens * row + words),
        ragged_rows=devices * each * tokens,
        dense_rows=float(devices * tokens),
        chip=chip,
        chosen=chosen,
    )
