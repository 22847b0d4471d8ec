"""What the benchmarks share. Imports no torch: contestants run in processes of their own."""
