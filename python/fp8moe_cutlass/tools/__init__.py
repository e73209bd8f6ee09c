"""The command line, `fp8moe-cutlass doctor | verify`, and what it runs."""
