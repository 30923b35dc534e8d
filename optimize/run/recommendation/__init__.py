"""Which artifact to serve: the rule that the user chooses, the tests behind it, and why each other was not chosen."""
