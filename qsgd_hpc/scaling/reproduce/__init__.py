"""Published results of others, compared with predictions or measurements of this project."""
