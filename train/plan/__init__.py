"""What a run will take, before anything is run: `headstart plan`."""

from train.plan.plan import Plan, make_plan
from train.plan.resources import Resources

__all__ = ["Plan", "Resources", "make_plan"]
