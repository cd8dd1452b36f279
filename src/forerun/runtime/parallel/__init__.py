"""One model on several ranks: starting them, telling them what to compute, noticing when one is lost."""
