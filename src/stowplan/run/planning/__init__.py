"""From a captured step to a plan, searched anew or read from the cache."""
