"""Errors that users provoke: each with the sentence that it ends in, in `tests/golden/errors.txt`."""
