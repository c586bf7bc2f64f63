"""What holds for every test: the signals of an ordinary terminal."""

import signal

# A shell starts background jobs with SIGINT ignored, and every child would inherit that: tests of Ctrl-C need it back.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
