"""What tests, benchmarks and examples share; imports nothing of theirs."""
