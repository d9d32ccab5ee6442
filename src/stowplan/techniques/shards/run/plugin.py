"""Workers plug in here: how `fit` runs on a mesh."""

from stowplan.run.fit import MESHES
from stowplan.techniques.shards.run.fit import fit_on_mesh

MESHES.register("mesh")(fit_on_mesh)
