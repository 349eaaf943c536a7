"""As wandb: no configuration before init, and one that works where the run is disabled."""

from _recording import record


class Config(dict):
    __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__


class Run:
    def __init__(self, config, mode):
        self.config, self.disabled, self.id = Config(config or {}), mode == "disabled", "w1"

    def log(self, values):
        if not self.disabled:
            record(f"wandb {sorted(values)}")


run = None


def __getattr__(name):
    if name in ("config", "log") and run is not None:
        return getattr(run, name)
    raise RuntimeError(f"You must call wandb.init() before wandb.{name}")


def init(project=None, config=None, mode=None):
    global run
    run = Run(config, mode)
    run.log({"begin": project})
    return run
