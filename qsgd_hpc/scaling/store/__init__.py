"""A study's folder: its attempts, what each recorded, and where it came from."""
