"""Mixture of experts: tokens to their experts, on other devices, and back.

rows, plan = moe.dispatch(x, experts, "x", num_experts=64)
y = expert_layers(rows, plan.group_sizes)
out = moe.combine(y, weights, plan, "x")
"""

from pallas_collectives.moe.calls import combine as combine
from pallas_collectives.moe.calls import dispatch as dispatch
from pallas_collectives.moe.explanation import explain as explain
from pallas_collectives.moe.plans import TokenPlan as TokenPlan
