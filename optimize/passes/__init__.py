"""The passes, one file each; `base` holds what they have in common."""
