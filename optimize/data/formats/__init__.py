"""The data formats, one file each; `base` holds what they have in common."""
