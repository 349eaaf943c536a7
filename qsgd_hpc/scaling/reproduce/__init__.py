"""Published results of others, beside what this project predicts or measures for them."""
