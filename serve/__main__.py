"""``python -m serve``: see `serve.cli`."""

from serve.cli import main

if __name__ == "__main__":
    main()
