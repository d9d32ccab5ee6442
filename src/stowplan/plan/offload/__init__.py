"""Offload: storages that nobody uses for a while wait in a tier, if the way there and back is worth it."""
