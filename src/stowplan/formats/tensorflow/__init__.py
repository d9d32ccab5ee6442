"""TensorFlow's table of one training step: a row per node, kernel and copy, with shapes but without edges.

    row = name {", " in} ", " out ", " device ", " number
    in  = shape | "(1)" | "(no input)" | "^" control source        shape = "(" [type SP] n {"x" n} ")"
    out = shape | "(no output)" | "(output " n " bytes)"

A row "node:Kernel" tells the op type of its node. Tensors and ops are named like their rows. Producers are
rebuilt in `forward.py`, `backward.py` and `wiring.py` from what TensorFlow's names and ops mean.
"""

from stowplan.formats.tensorflow.reader import FORMAT, read, recognise

__all__ = ["FORMAT", "read", "recognise"]
