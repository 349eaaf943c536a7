"""A study's folder: its attempts, their records and their provenance."""
