"""Offload: storages that no op uses for a while wait in a tier, if the two transfers are worth it."""
