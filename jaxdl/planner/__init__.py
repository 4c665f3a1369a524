"""Plans: which scheme each embedding table gets and which device has it, for a machine that may not be at hand."""

from jaxdl.planner.machine import nominal_machine
from jaxdl.planner.placement import Placement, place
from jaxdl.planner.table_search import plan_tables
from jaxdl.planner.tables import Costs, TablePlan, Workload, costs_of
from jaxdl.planner.zipf import distinct_rows

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
