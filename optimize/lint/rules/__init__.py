"""The rules, one module for each subject. Every module in this folder is found."""
