"""Tests, one folder for each part of the package; what they share is in `support`."""
