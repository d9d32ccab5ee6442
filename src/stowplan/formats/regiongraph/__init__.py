"""Region graphs: a drawn training step that shows which rect of each tensor a worker reads and writes.

    tensor := name "dim=[" n.. "]" "read_rect=" rect "write_rect=" (rect | "None")
    op     := name "result_dim=[" n.. "]" ["dist_input=" rect "dist_filters=" rect] "dist_result=" rect
    rect   := "Rect(array([lo..], dtype=int32), array([hi..], dtype=int32))"      half-open
    edge   := "->" port (tensor to op) | port "->" (op to tensor)
    name   := layer "." (filter|filterA|filterNL|W|a|b) [".output"] [".grad"] [".set_zero"]
            | "update_" parameter | data.. | classifier..

The reader takes both such text written clean, one box per block, and a page that OCR read off a drawing row
by row, with several boxes on a line and the damage that OCR does.
"""

from stowplan.formats.regiongraph.reader import FORMAT, read, recognise
from stowplan.formats.regiongraph.writer import write

__all__ = ["FORMAT", "read", "recognise", "write"]
