"""Tiers: where the storages of tensors wait outside of the device's memory."""
