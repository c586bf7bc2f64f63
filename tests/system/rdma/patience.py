"""Importing this makes the KV tier wait longer: an emulated machine takes 20 times as long for everything.

Only waits for something that goes well are stretched: a check says whether it works, and not how busy the host is.
"""

from dsuf.kv import client, directory, peers, rates, saves

TIMES = 20

directory.FIND_S *= TIMES
directory.WRITE_S *= TIMES
peers.CONNECT_S *= TIMES
peers.ANSWER_S *= TIMES
peers.Connection._ask.__defaults__ = (peers.ANSWER_S,)
peers.LINK_S *= TIMES
client.LOOKUP_S *= TIMES
client.ALIAS_S *= TIMES
saves.ALIAS_WAIT_S *= TIMES
rates.LONGEST_WAIT_S *= TIMES
