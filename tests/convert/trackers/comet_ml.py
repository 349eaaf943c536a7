"""As comet_ml: an experiment that can be disabled, and keeps its parameters then, too."""

from _recording import record


class Experiment:
    def __init__(self, project_name=None, disabled=False):
        self.disabled, self.parameters = disabled, {}

    def log_parameter(self, name, value):
        self.parameters[name] = value

    def get_parameter(self, name):
        return self.parameters[name]

    def log_metric(self, name, value):
        if not self.disabled:
            record(f"comet {name}")
