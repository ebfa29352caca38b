"""Lets `python -m benchmarks.peers` start the comparison with other engines."""

from benchmarks.peers.compare import main

if __name__ == "__main__":
    main()
