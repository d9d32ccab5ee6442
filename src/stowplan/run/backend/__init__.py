"""`torch.compile(backend="stowplan")`: one budget over all graphs of a step."""
