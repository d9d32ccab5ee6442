"""Whole iterations plug in here."""

from stowplan.run.iteration.iteration import RunningIteration
from stowplan.run.iteration.one_by_one import UpdateBook
from stowplan.run.iteration.planner import IterationPlanner
from stowplan.run.planning.iterations import ITERATIONS, Iterations

ITERATIONS.register("optimizer")(Iterations(IterationPlanner, RunningIteration, UpdateBook))
