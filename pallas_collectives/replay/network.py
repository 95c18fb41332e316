"""A fluid model of shared links and memories: every copy in flight gets its max-min fair share of
what it crosses.

A copy (flow) crosses resources, each with a weight: how many such flows one resource carries
(several where devices in symmetric positions are modelled by one). Rates are recomputed only for
flows that share, directly or through others, a resource on which something changed; a resource that
could not be saturated by all its flows at full speed joins nobody.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np


@dataclasses.dataclass(eq=False, slots=True)
class Flow:
    """A copy in flight. `remaining` bytes as of `updated`; `cap` is its rate when alone,
    bytes/s.
    """

    message: Any
    remaining: float
    uses: list[tuple[int, float]]  # (resource, weight)
    cap: float
    rate: float = 0.0
    updated: float = 0.0
    version: int = 0  # completions scheduled under an older version are void
    _arrays: tuple[np.ndarray, np.ndarray] | None = None

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """The resources of `uses`, and their weights."""
        if self._arrays is None:
            resources, weights = zip(*self.uses, strict=True) if self.uses else ((), ())
            self._arrays = np.array(resources, np.intp), np.array(weights, float)
        return self._arrays


class Network:
    """The flows in progress and their rates."""

    def __init__(self, capacity: np.ndarray, shared: bool = True):
        """`shared`: flows slow one another down; else each goes as if it were alone."""
        self.capacity = capacity
        self._shared = shared
        self._demand = np.zeros(len(capacity))
        self._flows: dict[int, dict[Flow, float]] = {}
        self._dirty_flows: set[Flow] = set()
        self._dirty_resources: set[int] = set()
        self.carried = np.zeros(len(capacity))  # bytes so far, per resource

    def add(self, message: Any, nbytes: float, uses: list[tuple[int, float]], now: float) -> Flow:
        cap = min((self.capacity[r] / w for r, w in uses), default=math.inf)
        flow = Flow(message, nbytes, uses, cap, updated=now)
        for r, w in uses:
            self._demand[r] += w * cap
            self._flows.setdefault(r, {})[flow] = w
            self.carried[r] += w * nbytes
        self._dirty_flows.add(flow)
        return flow

    def remove(self, flow: Flow) -> None:
        for r, w in flow.uses:
            if self._binds(r):
                self._dirty_resources.add(r)
            self._demand[r] -= w * flow.cap
            del self._flows[r][flow]
        self._dirty_flows.discard(flow)

    @property
    def dirty(self) -> bool:
        return bool(self._dirty_flows or self._dirty_resources)

    def _binds(self, resource: int) -> bool:
        return self._shared and self._demand[resource] > self.capacity[resource] * (1 + 1e-9)

    def resolve(self, now: float) -> list[Flow]:
        """Recomputes rates after changes at `now`; returns the flows whose rate changed."""
        component, resources = self._component()
        self._dirty_flows.clear()
        self._dirty_resources.clear()
        if not component:
            return []
        rates = (
            [component[0].cap]
            if len(component) == 1
            else _fair_rates(component, resources, self.capacity)
        )
        changed = []
        for flow, rate in zip(component, rates, strict=True):
            if abs(rate - flow.rate) > 1e-9 * rate:
                flow.remaining -= flow.rate * (now - flow.updated)
                flow.updated, flow.rate = now, rate
                flow.version += 1
                changed.append(flow)
        return changed

    def _component(self) -> tuple[list[Flow], set[int]]:
        found: dict[Flow, None] = dict.fromkeys(self._dirty_flows)
        for r in self._dirty_resources:
            found.update(dict.fromkeys(self._flows.get(r, ())))
        resources: set[int] = set()
        queue = list(found)
        while queue:
            for r, _ in queue.pop().uses:
                if r not in resources and self._binds(r):
                    resources.add(r)
                    for other in self._flows[r]:
                        if other not in found:
                            found[other] = None
                            queue.append(other)
        return list(found), resources


def _fair_rates(flows: list[Flow], resources: set[int], capacity: np.ndarray) -> list[float]:
    """Max-min fair rates by progressive filling: all rates rise together until a resource or a
    flow's own cap is full.
    """
    caps = np.array([flow.cap for flow in flows])
    if not resources:
        return caps.tolist()
    here = np.array(list(resources))
    number = np.full(len(capacity), -1)
    number[here] = np.arange(len(here))
    used, weights = zip(*(flow.arrays() for flow in flows), strict=True)
    column = number[np.concatenate(used)]
    binds = column >= 0
    row = np.repeat(np.arange(len(flows)), [len(r) for r in used])[binds]
    column, weight = column[binds], np.concatenate(weights)[binds]
    left = capacity[here].astype(float)
    rates = np.zeros(len(flows))
    rising = np.ones(len(flows), bool)
    while rising.any():
        active = rising[row]
        load = np.bincount(column[active], weight[active], len(left))
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(load > 0, left / load, np.inf)
        limit = caps.copy()
        np.minimum.at(limit, row[active], share[column[active]])
        level = limit[rising].min()
        stops = rising & (limit <= level * (1 + 1e-12))
        rates[stops] = level
        stopped = stops[row]
        left = left - np.bincount(column[stopped], weight[stopped] * level, len(left))
        left = np.maximum(left, 0.0)
        rising &= ~stops
    return rates.tolist()
