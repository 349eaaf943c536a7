"""A folder for PYTHONPATH, in which ``horovod`` is found. Nothing imports it as a package."""
