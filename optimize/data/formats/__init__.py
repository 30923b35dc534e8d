"""The data formats, one file each. `base` holds what they share."""
