"""A folder for PYTHONPATH that contains ``horovod``. It is not imported as a package."""
