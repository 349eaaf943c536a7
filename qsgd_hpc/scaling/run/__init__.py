"""Running a study: jobs of one or many points, their progress and their cost."""
