"""The rewrites. One file a pass; `default_pipeline` is what ``gemopt.compile`` runs unless a recipe names another."""

from __future__ import annotations

from typing import Any

from gemopt.graph.capture import Captured
from gemopt.graph.plan import Plan
from gemopt.recipe import Recipe


def default_pipeline(captured: Captured, recipe: Recipe, report: Any) -> Plan | None:
    """Canonicalise, recognise, unpad, fuse norms. Returns the plan of the packed graph, or None where nothing is gained."""
    from gemopt.passes.canonicalise import canonicalise
    from gemopt.passes.convolutions import pointwise_convolutions
    from gemopt.passes.jagged import jagged_inputs
    from gemopt.passes.norm_fusion import fuse_norms
    from gemopt.passes.unpad import unpad

    report.record_graph("capture", captured.gm)
    disabled = set(recipe.disabled)
    if "pointwise_convolutions" not in disabled:
        pointwise_convolutions(captured.gm)
    if "jagged_inputs" not in disabled:
        jagged_inputs(captured.gm)
    canonicalise(captured.gm)
    report.record_graph("canonicalise", captured.gm)
    plan = None if "unpad" in disabled else unpad(captured, recipe, report)
    if plan is not None:
        report.record_graph("unpad", plan.packed)
        if "fuse_norms" not in disabled and fuse_norms(captured, plan, recipe, report):
            report.record_graph("norm fusion", plan.packed)
        report.record_graph("prologue", plan.prologue)
    return plan
