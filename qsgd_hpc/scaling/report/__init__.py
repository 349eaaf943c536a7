"""The report of a study: page, Markdown, tables, plots and terminal output."""
