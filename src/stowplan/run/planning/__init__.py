"""From a captured step to a plan, searched or read from the cache."""
