"""`make compatibility`: which features of stowplan work on which versions of PyTorch, tried one by one."""
