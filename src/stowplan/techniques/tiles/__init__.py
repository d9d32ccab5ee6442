"""Tiles: a segment is computed tile by tile, in forward and in backward."""
