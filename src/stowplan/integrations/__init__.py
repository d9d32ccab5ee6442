"""Integrations: one module per package, imported only by users of that package.

Each puts a fitted model where the package would use the original one, with the guarantees of `stowplan.fit`.
"""
