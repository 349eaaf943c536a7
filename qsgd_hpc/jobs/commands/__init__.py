"""The commands on jobs and sites: their options, and what they print."""
