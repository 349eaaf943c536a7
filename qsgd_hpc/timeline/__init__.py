"""Timelines: written by a job, merged over ranks, summarised by step and tensor."""
