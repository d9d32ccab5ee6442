"""Real processes as the workers of a mesh: started, compared with one process, and lost."""
