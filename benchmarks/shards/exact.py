"""Steps over meshes of real processes against one process, in float64 with dropout on: how far apart."""

from collections.abc import Sequence

from benchmarks.results import Study
from tests.support.workers.compared import Cell, Outcome, compare_all
from tests.support.workers.processes import on_workers

_IMAGES = {"1x2": "space=1x2", "2x2": "space=2x2", "3x1": "space=3x1", "4 uneven": "space=1:3:1:2"}
_SEQUENCES = {
    "1x2": "data=1,sequence=2",
    "2x2": "data=2,sequence=2",
    "3x1": "data=3,sequence=1",
    "4 uneven": "sequence=1:3:1:2",
}
MESHES = {"unet": _IMAGES, "resnet50": _IMAGES, "unet3d": _IMAGES, "vit": _IMAGES, "gpt": _SEQUENCES}
"""By net, what each mesh cuts of it."""


def main(_: Sequence[str]) -> None:
    """The worker that is farthest off, for every net on every mesh."""
    cells = [Cell(net, mesh) for net, meshes in MESHES.items() for mesh in meshes.values()]
    found: dict[Cell, list[Outcome]] = {}
    for count in (2, 3, 4):
        asked = [cell for cell in cells if cell.workers == count]
        by_worker = on_workers(count, compare_all, asked)
        found.update(zip(asked, map(list, zip(*by_worker, strict=True)), strict=True))
    print(f"{'net':10} {'mesh':20} {'loss':>9} {'gradients':>9} {'buffers':>9}  draws and bytes")
    for cell in cells:
        worst = max(found[cell], key=lambda outcome: outcome.worst)
        far = f"{worst.loss:9.1e} {worst.gradients:9.1e} {worst.buffers:9.1e}"
        told = "as they must be" if all(outcome.is_right for outcome in found[cell]) else "WRONG"
        print(f"{cell.net:10} {cell.mesh:20} {far}  {told}")
        Study("shards").tell(f"{cell.net} on {cell.mesh}", "workers", "distance", worst.worst, "relative")
