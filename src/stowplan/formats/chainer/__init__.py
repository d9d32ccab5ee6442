"""Chainer's dump of one training step: variables with their bytes, then one record per function call.

    file     = header variable{N_vars} record{N_ops}    header = N_vars SP N_ops
    variable = id SP bytes SP name                      name = "_" | "/" link "/" parameter | digits (input)
    record   = ("forward"|"backward") NL n_in SP n_out NL input{n_in} output{n_out} type NL json NL
    input    = id SP tag                                tag = "_" (forward) | "gradient" | "input" | "output"
    output   = id

The i-th backward record is the adjoint of the i-th forward record. One id names a value and its gradient; in
the graph the value keeps the id ("53") and the gradient is "53.grad", a dropout mask "53.mask": no id of the
file may end like that. An op is named after its link or type and its first output: "conv_u0b_c.90",
"ReLU.99", and its adjoint "ReLU.99.backward" of type "ReLU.backward".
"""

from stowplan.formats.chainer.reader import FORMAT, read, recognise
from stowplan.formats.chainer.views import SavedView
from stowplan.formats.chainer.writer import write

__all__ = ["FORMAT", "SavedView", "read", "recognise", "write"]
