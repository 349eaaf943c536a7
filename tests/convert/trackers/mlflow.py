"""As mlflow: a run is of the store of its rank, and cannot be disabled."""

from types import SimpleNamespace

from _recording import record

_store, _active = "records.txt", None


class Run:
    info = SimpleNamespace(run_id="m1")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        global _active
        _active = None


def set_tracking_uri(uri):
    global _store
    _store = uri.removeprefix("sqlite:///")


def start_run():
    global _active
    _active = Run()
    record("mlflow begin", _store)
    return _active


def active_run():
    return _active


def log_metric(name, value):
    record(f"mlflow {name}", _store)
