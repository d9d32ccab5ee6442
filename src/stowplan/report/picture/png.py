"""A drawing as PNG."""

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

from stowplan.report.picture.canvas import PIXELS, Canvas
from stowplan.report.picture.shapes import Drawing

_METRE = 72 * PIXELS * 10_000 // 254  # pixels to a metre


def png_of_drawing(drawing: Drawing) -> bytes:
    """The drawing at three pixels to a point."""
    canvas = Canvas(drawing.width, drawing.height)
    for shape in drawing.shapes:
        canvas.draw(shape)
    return _encoded(canvas.averaged())


def _encoded(pixels: NDArray[np.uint8]) -> bytes:
    """Rows as differences to the row above, which are mostly zero, compressed."""
    height, width, _ = pixels.shape
    above = np.vstack([np.zeros_like(pixels[:1]), pixels[:-1]])
    rows = (pixels - above).reshape(height, -1)
    filtered = np.hstack([np.full((height, 1), 2, dtype=np.uint8), rows])
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
            _chunk(b"pHYs", struct.pack(">IIB", _METRE, _METRE, 1)),
            _chunk(b"IDAT", zlib.compress(filtered.tobytes(), 9)),
            _chunk(b"IEND", b""),
        )
    )


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
