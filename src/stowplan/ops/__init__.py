"""Facts about each op type: one table per question, filled in the module of that question."""
