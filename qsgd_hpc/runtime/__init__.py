"""The runtime of a rank: init and shutdown, collectives, settings, planning and tuning."""
