"""``python -m optimize``."""

from optimize.cli import main

if __name__ == "__main__":
    main()
