"""A fluid model of shared links and memories: every copy in flight gets its max-min fair share of
what it crosses.

A copy crosses resources, each with a weight: how many such copies one resource carries (several
where devices in symmetric positions are modelled by one). Copies that cross the same resources have
the same rate, and make one flow. Rates are recomputed only for flows that share, directly or
through others, a resource on which something changed; a resource that could not be saturated by all
its flows at full speed joins nobody.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from typing import Any

import numpy as np

PICOSECOND = 1e-12  # what is closer together happens at once

Uses = list[tuple[int, float]]  # (resource, weight)


@dataclasses.dataclass(eq=False, slots=True)
class Flow:
    """Copies in flight over the same resources.

    Each has had `served` bytes as of `updated`, counted from when the flow began. `cap` is the rate
    of one that is alone, bytes/s.
    """

    uses: Uses
    cap: float
    resources: np.ndarray
    weights: np.ndarray
    rate: float = 0.0
    served: float = 0.0
    updated: float = 0.0
    version: int = 0  # ends scheduled under an older version are void
    # (what will have been served at its end, number, message) of each copy
    copies: list[tuple[float, int, Any]] = dataclasses.field(default_factory=list)

    def bring_up(self, now: float) -> None:
        """Counts what has been served up to now."""
        if now > self.updated and self.rate < math.inf:  # what is not held up at all ends at once
            self.served += self.rate * (now - self.updated)
        self.updated = now

    @property
    def next_end(self) -> float:
        """When the first of its copies ends, at this rate."""
        return self.updated + max(0.0, self.copies[0][0] - self.served) / self.rate


class Network:
    """The flows in progress and their rates."""

    def __init__(self, capacity: np.ndarray, shared: bool = True):
        """`shared`: copies slow one another down; else each goes as if it were alone."""
        self.capacity = capacity
        self._shared = shared
        self._demand = np.zeros(len(capacity))
        self._known: dict[tuple[tuple[int, float], ...], Flow] = {}
        self._flows: dict[int, dict[Flow, None]] = {}
        self._dirty_flows: dict[Flow, None] = {}
        self._dirty_resources: set[int] = set()
        self._numbers = itertools.count()
        self.carried = np.zeros(len(capacity))  # bytes so far, per resource

    def add(self, message: Any, nbytes: float, uses: Uses, now: float) -> Flow:
        """Begins a copy; returns the flow that it is part of."""
        key = tuple(uses)
        flow = self._known.get(key)
        if flow is None:
            cap = min((self.capacity[r] / w for r, w in uses), default=math.inf)
            resources, weights = zip(*uses, strict=True) if uses else ((), ())
            arrays = np.array(resources, np.intp), np.array(weights, float)
            flow = self._known[key] = Flow(uses, cap, *arrays)
        if not flow.copies:
            flow.rate = flow.served = 0.0
        flow.bring_up(now)
        heapq.heappush(flow.copies, (flow.served + nbytes, next(self._numbers), message))
        for r, w in uses:
            self._demand[r] += w * flow.cap
            self._flows.setdefault(r, {})[flow] = None
            self.carried[r] += w * nbytes
        self._dirty_flows[flow] = None
        return flow

    def remove(self, flow: Flow) -> Any:
        """Ends the copy of a flow that is to end first; returns its message."""
        *_, message = heapq.heappop(flow.copies)
        for r, w in flow.uses:
            if self._binds(r):
                self._dirty_resources.add(r)
            self._demand[r] -= w * flow.cap
            if not flow.copies:
                del self._flows[r][flow]
        if flow.copies:
            self._dirty_flows[flow] = None
        else:
            self._dirty_flows.pop(flow, None)
        return message

    def ended(self, flow: Flow, now: float) -> list[Any]:
        """Ends the copies of a flow whose first ends now; returns their messages."""
        flow.bring_up(now)
        messages = [self.remove(flow)]
        while flow.copies and flow.copies[0][0] <= flow.served + flow.rate * PICOSECOND:
            messages.append(self.remove(flow))
        return messages

    @property
    def dirty(self) -> bool:
        return bool(self._dirty_flows or self._dirty_resources)

    def _binds(self, resource: int) -> bool:
        return self._shared and self._demand[resource] > self.capacity[resource] * (1 + 1e-9)

    def resolve(self, now: float) -> list[Flow]:
        """Recomputes rates after changes at `now`; returns the flows whose next end is another."""
        touched = self._dirty_flows
        component, resources = self._component()
        self._dirty_flows = {}
        self._dirty_resources.clear()
        if not component:
            return []
        rates = [flow.cap for flow in component]
        if resources:
            rates = _fair_rates(component, resources, self.capacity)
        changed = []
        for flow, rate in zip(component, rates, strict=True):
            if abs(rate - flow.rate) > 1e-9 * rate or flow in touched:
                flow.bring_up(now)
                flow.rate = rate
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
    here = np.array(list(resources))
    number = np.full(len(capacity), -1)
    number[here] = np.arange(len(here))
    # Which flow crosses which of the resources that bind, by flow; and the same by resource.
    column = number[np.concatenate([flow.resources for flow in flows])]
    binds = column >= 0
    row = np.repeat(np.arange(len(flows)), [len(flow.uses) for flow in flows])[binds]
    copies = np.array([len(flow.copies) for flow in flows], float)
    weight = np.concatenate([flow.weights for flow in flows])[binds] * copies[row]
    column = column[binds]
    of_flow = np.searchsorted(row, np.arange(len(flows) + 1))
    by_resource = np.argsort(column, kind="stable")
    of_resource = np.searchsorted(column[by_resource], np.arange(len(here) + 1))
    caps = np.array([flow.cap for flow in flows])
    by_cap, capped = np.argsort(caps, kind="stable"), 0
    left, load = capacity[here].astype(float), np.bincount(column, weight, len(here))
    rising_on = np.bincount(column, minlength=len(here))
    rates, rising = np.zeros(len(flows)), np.ones(len(flows), bool)
    while True:
        while capped < len(flows) and not rising[by_cap[capped]]:
            capped += 1
        if capped == len(flows):
            return rates.tolist()
        share = np.full(len(here), np.inf)
        np.divide(left, load, out=share, where=rising_on > 0)
        level = min(share.min(), caps[by_cap[capped]])
        tight = level * (1 + 1e-12)
        stops = row[by_resource[_ranges(of_resource, np.flatnonzero(share <= tight))]]
        end = int(np.searchsorted(caps, tight, "right", sorter=by_cap))
        stops = np.unique(np.concatenate([stops, by_cap[capped:end]]))
        stops = stops[rising[stops]]
        rates[stops] = level
        rising[stops] = False
        crossed = _ranges(of_flow, stops)
        at, less = column[crossed], weight[crossed]
        load -= np.bincount(at, less, len(here))
        left = np.maximum(left - level * np.bincount(at, less, len(here)), 0.0)
        rising_on -= np.bincount(at, minlength=len(here))


def _ranges(starts: np.ndarray, which: np.ndarray) -> np.ndarray:
    """starts[i], ..., starts[i + 1] - 1 for each i of which."""
    sizes = starts[which + 1] - starts[which]
    before = np.cumsum(sizes) - sizes
    return np.arange(sizes.sum()) + np.repeat(starts[which] - before, sizes)
