"""dsuf builds, runs, serves and benchmarks DeepSeek-V4.1-Flash from Python."""

__version__ = "0.1.0"
