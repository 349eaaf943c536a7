"""Timelines: written by a job, merged over ranks, summed up by step and tensor."""
