// The parts of the report under one name. Every file adds one part; html.py lists them in order.
globalThis.stow = {};
