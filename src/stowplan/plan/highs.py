"""Programs over columns between 0 and 1, solved by HiGHS, which scipy brings.

`import scipy.optimize` takes most of a second, of which HiGHS itself needs a fiftieth. Its extension is
therefore loaded alone, from where scipy has it since 1.15, under the name that scipy would give it: whoever
imports `scipy.optimize` later gets the same module. Where it is not there, `scipy.optimize.milp` does the
same, later.
"""

import sys
from dataclasses import dataclass
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NODES = 1  # of the branching: more of them never made a bound closer
_NEAR = 0.001  # of the optimum
_EXTENSION = "scipy.optimize._highspy._core"

Floats = NDArray[np.float64]
Places = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LinearProgram:
    """Minimise `cost` x, where each row of a sparse matrix times x has a least value.

    The matrix is stored by columns: those of column c are `starts[c]` to `starts[c + 1]` of `rows` and
    `factors`.
    """

    cost: Floats
    starts: Places
    rows: Places
    factors: Floats

    @staticmethod
    def of(cost: Floats, terms: tuple[Places, Places, Floats]) -> "LinearProgram":
        """From the terms of all rows: their rows, columns and factors."""
        rows, columns, factors = terms
        order = np.lexsort((rows, columns))
        starts = np.searchsorted(columns[order], np.arange(len(cost) + 1)).astype(np.int32)
        return LinearProgram(cost, starts, rows[order], factors[order])

    def solved(self, least: Floats, *, whole: bool) -> tuple[float, Floats | None]:
        """A lower bound on the optimum, and the best x that was met, if one was.

        `whole` forbids fractions, as far as some branching gets.
        """
        core = _highs()
        return self._by_scipy(least, whole) if core is None else self._by_highs(core, least, whole)

    def _by_highs(self, core: Any, least: Floats, whole: bool) -> tuple[float, Floats | None]:
        columns, rows = len(self.cost), len(least)
        linear = core.HighsLp()
        linear.num_col_, linear.num_row_ = columns, rows
        matrix = linear.a_matrix_
        matrix.num_col_, matrix.num_row_, matrix.format_ = columns, rows, core.MatrixFormat.kColwise
        matrix.start_, matrix.index_, matrix.value_ = self.starts, self.rows, self.factors
        linear.col_cost_, linear.col_lower_, linear.col_upper_ = (
            self.cost,
            np.zeros(columns),
            np.ones(columns),
        )
        linear.row_lower_, linear.row_upper_ = least, np.full(rows, np.inf)
        if whole:
            linear.integrality_ = [core.HighsVarType.kInteger] * columns
        options, solver = core.HighsOptions(), core._Highs()
        options.log_to_console = False
        options.mip_max_nodes, options.mip_rel_gap = _NODES, _NEAR
        solver.passOptions(options)
        solver.passModel(linear)
        solver.run()
        status, told, info = solver.getModelStatus(), core.HighsModelStatus, solver.getInfo()
        if not whole:
            is_done = status == told.kOptimal
            return (info.objective_function_value, _values(solver)) if is_done else (0.0, None)
        ended = status in (told.kTimeLimit, told.kIterationLimit, told.kSolutionLimit)
        is_met = status == told.kOptimal or (ended and info.objective_function_value < np.inf)
        return (info.mip_dual_bound, _values(solver)) if is_met else (0.0, None)

    def _by_scipy(self, least: Floats, whole: bool) -> tuple[float, Floats | None]:
        from scipy.optimize import Bounds, LinearConstraint, milp  # here: most of a second
        from scipy.sparse import csc_array

        matrix = csc_array((self.factors, self.rows, self.starts), shape=(len(least), len(self.cost)))
        answer = milp(
            self.cost,
            constraints=LinearConstraint(matrix, lb=least),
            bounds=Bounds(0, 1),
            integrality=np.full(len(self.cost), int(whole)),
            options={"node_limit": _NODES, "mip_rel_gap": _NEAR},
        )
        return (answer.mip_dual_bound if whole else answer.fun) or 0.0, answer.x


def _values(solver: Any) -> Floats:
    return np.array(solver.getSolution().col_value)


@cache
def _highs() -> Any:
    """HiGHS without the rest of `scipy.optimize`; None where this scipy keeps it elsewhere."""
    import scipy

    if _EXTENSION in sys.modules:
        return sys.modules[_EXTENSION]
    folder = Path(scipy.__file__).parent / "optimize" / "_highspy"
    place = PathFinder.find_spec("_core", [str(folder)])
    spec = spec_from_file_location(_EXTENSION, place.origin) if place and place.origin else None
    if spec is None or spec.loader is None:
        return None
    core = module_from_spec(spec)
    try:
        spec.loader.exec_module(core)
    except ImportError:
        return None
    if not all(hasattr(core, name) for name in ("_Highs", "HighsLp", "HighsOptions", "HighsModelStatus")):
        return None
    sys.modules[_EXTENSION] = core
    return core
