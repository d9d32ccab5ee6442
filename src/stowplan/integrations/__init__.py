"""Where users already are: one small file per package, imported only by whoever has that package.

Each puts a fitted model where the package would use the plain one; `stowplan.fit` keeps its promises there.
"""
