"""Plans: which scheme each embedding table gets and which device has it, for a machine that may not be at hand."""

from jaxdl.performance.planner.machine import nominal_machine
from jaxdl.performance.planner.placement import Placement, place
from jaxdl.performance.planner.table_search import plan_tables
from jaxdl.performance.planner.tables import Costs, TablePlan, Workload, costs_of
from jaxdl.performance.planner.zipf import distinct_rows

__all__ = [
    "Costs",
    "Placement",
    "TablePlan",
    "Workload",
    "costs_of",
    "distinct_rows",
    "nominal_machine",
    "place",
    "plan_tables",
]
