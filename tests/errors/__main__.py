"""`python -m tests.errors` provokes all errors and writes `tests/golden/errors.txt` anew."""

from tests.errors.catalogue import GOLDEN, catalogue

GOLDEN.write_text(catalogue(), encoding="utf-8")
