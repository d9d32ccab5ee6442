"""The cost of ops on this machine: each distinct op is probed for its seconds and workspace."""
