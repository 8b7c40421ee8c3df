"""What takes part in ``benchmarks/federation.py``: one file each, each a process of its own."""
