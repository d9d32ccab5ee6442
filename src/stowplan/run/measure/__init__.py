"""What a step takes when it runs, and how it compares with eager."""
