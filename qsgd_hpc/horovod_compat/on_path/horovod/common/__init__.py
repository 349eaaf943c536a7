"""``horovod.common``: internal modules of Horovod that scripts use."""
