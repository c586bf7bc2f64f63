"""RDMA: see `transport.py`. pyverbs is imported when a transport is opened or this machine is described, not before."""

from dsuf.kv.transport.rdma.describe import describe
from dsuf.kv.transport.rdma.transport import RdmaTransport

__all__ = ["RdmaTransport", "describe"]
