"""What is known about each op type: one table per question, filled in the file of that question."""
