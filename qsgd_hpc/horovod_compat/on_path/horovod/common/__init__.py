"""``horovod.common``: the part of Horovod's insides that scripts reach into."""
