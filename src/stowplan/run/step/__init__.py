"""A plan as a program: generated Python, bound to a model, differentiated by autograd."""
