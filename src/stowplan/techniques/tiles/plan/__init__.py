"""Segments computed rectangle by rectangle: which can be, what a tile takes, what a sweep costs."""
