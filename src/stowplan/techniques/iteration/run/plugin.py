"""Whole iterations plug in here."""

from stowplan.run.planning.iterations import ITERATIONS, Iterations
from stowplan.techniques.iteration.run.iteration import RunningIteration
from stowplan.techniques.iteration.run.one_by_one import UpdateBook
from stowplan.techniques.iteration.run.planner import IterationPlanner

ITERATIONS.register("optimizer")(Iterations(IterationPlanner, RunningIteration, UpdateBook))
