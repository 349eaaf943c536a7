"""The commands on jobs and sites: options and output."""
