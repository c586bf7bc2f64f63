"""The `dsuf` command with the waits of `patience.py`, also in the processes that it spawns: they import this again."""

from tests.system.rdma import patience  # noqa: F401

if __name__ == "__main__":
    from dsuf.cli.app import main

    main()
