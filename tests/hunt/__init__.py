"""The hunter: looks for faults by chance, for as long as it is given. A number repeats each case.

`files` hunts among damaged files. The rest hunts among training loops: random networks times random loop
programs times budgets, in lockstep with eager. A case draws a network (`networks`, of the ops in `ops`), its
inputs (`batches`), a loop program (`actions`), techniques and a budget (`cases`). Two sides run it (`sides`):
the model in eager, and its twin through `fit`. `lockstep` compares everything that a training loop can see
and gives a verdict; `shrinking` makes a failing case small. `python -m tests.hunt --help` says more.
"""
