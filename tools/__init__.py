"""What maintainers run: the reference page, the wheel in clean environments, releases."""
