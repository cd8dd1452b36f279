"""How passes are executed and drafts drawn: eagerly, as a recorded CPU program, or as captured GPU graphs."""
