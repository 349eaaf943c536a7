"""As neptune: fields of a run, which keeps nothing in its debug mode."""

from _recording import record


class Field:
    def __init__(self, run, name):
        self.run, self.name = run, name

    def append(self, value):
        if self.run.mode != "debug":
            record(f"neptune {self.name}")

    def fetch(self):
        return self.run.fields[self.name]


class Run:
    def __init__(self, mode):
        self.mode, self.fields = mode, {}

    def __setitem__(self, name, value):
        self.fields[name] = value

    def __getitem__(self, name):
        return Field(self, name)


def init_run(project=None, mode=None):
    return Run(mode)
