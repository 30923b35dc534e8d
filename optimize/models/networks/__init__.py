"""The project's own networks, for names that need no library. In: classes. Out: modules with random weights."""
