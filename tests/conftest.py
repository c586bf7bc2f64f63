"""What holds for every test: the signals of an ordinary terminal, and examples that are the same in every run.

A change is judged by the same examples as the one before it; `pytest --hypothesis-profile=random` draws others.
"""

import signal

from hypothesis import HealthCheck, settings

# A shell starts background jobs with SIGINT ignored, and every child would inherit that: tests of Ctrl-C need it back.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# how long examples take says something of the machine and what else it does, nothing of the code
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("random"), derandomize=True, database=None)
settings.load_profile("same")
